"""`Strategy`: the face that a program sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat import context, nest
from mpistrat.arrays import gradients_are_on
from mpistrat.communicators import RaisingOnAll
from mpistrat.context import (
    at_top_level,
    check_call,
    cross_replica,
    current_local_replica,
    entered,
    in_replica_block,
    per_thread,
    require_cross_replica,
)
from mpistrat.input import DistributedDataset, InputContext, ValueContext
from mpistrat.input.batches import explain_empty_batch
from mpistrat.input.distribution import distribute, distribute_from_function
from mpistrat.input.preparing import prepare
from mpistrat.input.shards import shard
from mpistrat.machine.notices import warn_of_no_effect
from mpistrat.options import AutoShardPolicy, InputOptions, InputReplicationMode, RunOptions
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.rank_methods import RankMethods
from mpistrat.replicas.replica_block import ReplicaBlock
from mpistrat.replicas.strategy_extended import StrategyExtended
from mpistrat.trace import spans
from mpistrat.values import DistributedValues, regroup, select_replica

if TYPE_CHECKING:
    import contextlib

    import torch
    from typing_extensions import Self

    from mpistrat.cluster_resolver import ClusterResolver


class Strategy(RankMethods):
    """Where replicas run, how their variables are kept, and how their values are combined.

    Use a subclass: `MultiWorkerMirroredStrategy` for all ranks, `MirroredStrategy` for those of a node,
    `OneDeviceStrategy` for one device.
    """

    # Whether it stands where a program has entered no strategy.
    is_default = False
    # Of how many workers, each with `num_replicas_in_sync` replicas, a step combines the gradients.
    workers_combined = 1
    # Why it has no `replica()`, as the end of a sentence; "" if it has.
    why_no_replica_block = ""

    def __init__(
        self, extended: StrategyExtended, cluster_resolver: ClusterResolver | None = None
    ) -> None:
        if not isinstance(extended, StrategyExtended):
            raise TypeError(
                f"{type(self).__name__} takes a StrategyExtended, got {extended!r:.60}; to train, make a "
                "MultiWorkerMirroredStrategy, a MirroredStrategy or a OneDeviceStrategy"
            )
        self._extended, self._cluster_resolver = extended, cluster_resolver
        self._replicas, self._modules = extended.replicas, extended.modules
        # Calls of `run` so far, and inside `replica()` steps of distributed datasets: ranks whose counts differ at a
        # backward are not in the same step.
        self.runs = 0

    @property
    def extended(self) -> StrategyExtended:
        """Additional methods, for algorithms that need to be aware of the distribution."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas, on all ranks, gradients are combined."""
        return self._extended.num_replicas_in_sync

    @property
    def step_examples(self) -> tuple[int, int] | None:
        """How many examples this replica, and all replicas, have in the step that a distributed dataset gave last.

        That is of the iterations that the program still has: after an evaluation in mid-epoch it is the step before it.
        While gradients are on, a step that was given inside `torch.no_grad()` does not count, if there is another.
        None where that is not known: outside every iteration; where each rank reads what it likes (a dataset function,
        files of its own, `AutoShardPolicy.OFF`); and of a rank with several replicas outside `run`.
        """
        steps = self._extended.given_steps
        examples = steps.examples_with_gradients if gradients_are_on() else steps.examples
        if examples is None:
            return None
        *local, total = examples.tolist()
        # Where one call is for several replicas, it is that of none of them.
        replica = current_local_replica() if self._replicas.count == len(local) else None
        if replica is None and len(set(local)) > 1:
            return None
        return local[replica or 0], total

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Who takes part; None for strategies of one process."""
        return self._cluster_resolver

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """A context in which variables and torch modules that are made belong to this strategy.

        Called by: every rank. At the outermost exit, the parameters and buffers of torch modules made
        inside become equal on all ranks: rank 0's.
        Raises:
            RuntimeError: inside `run`, or inside another strategy's scope.
        """
        return _Scope(self)

    def replica(self) -> ReplicaBlock:
        """A context in which the program's own loop is this rank's replica's work, with no function for `run`.

        Legal inside is what is legal in a replica, and what is legal in the cross-replica context (`next(iterator)`,
        `reduce`, `gather`, `mirror`, `scope`, checkpoints), each a `merge_call`. `run(fn, args)` is `fn(*args)`.
        `backward()` leaves the mean of the replicas' gradients, as DistributedDataParallel does, unless
        `compute_average_loss` or the strategy's `gradients` has decided that it is the sum. A step ends at each
        `optimizer.step()`. Random numbers, and threads that the program starts, are its own.

        Called by: every rank.   Context: cross-replica or top level.
        Returns: a context manager, which gives the `ReplicaContext`.
        Raises:
            RuntimeError: on all ranks, if one has several replicas, or with TPUs or parameter servers; inside `run`, or
                in another strategy's scope.
        """
        return ReplicaBlock(self._extended, self.why_no_replica_block)

    def enter_replica(self) -> Self:
        """Enter `replica()` for the rest of the program, on this thread; returns the strategy."""
        self.replica().__enter__()
        return self

    @not_compiled
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn` on every replica of this rank, each with its own components of the arguments.

        Called by: every rank, equally often, which `backward()` checks: what one rank wants of its own it
        calls without `run`.   Context: cross-replica or top level. It communicates nothing by itself.
        Args:
            fn: one replica's work; it may call `get_replica_context()`.
            args, kwargs: distributed values in them are replaced by the replica's component, variables
                are passed whole, everything else as it is.
        Returns:
            what `fn` returned; with several replicas per rank a structure of `PerReplica` values.
        Raises:
            what `fn` raised. RuntimeError: inside `run`, or in another strategy's scope.
        """
        check_call("run", fn, args, kwargs)
        if in_replica_block(self):
            self._modules.before_run()
            return fn(*select_replica(0, tuple(args)), **select_replica(0, dict(kwargs or {})))
        if options is not None:
            _check_run_options(options, self._extended.communicator.rank)
        if per_thread.modes:
            require_cross_replica(self, "run")
        # Entering the object that does nothing would take a sixth of an empty run.
        if spans.current is not spans.NO_SPANS:
            with spans.current.run(fn):
                return self._run(fn, args, kwargs)
        return self._run(fn, args, kwargs)

    def _run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        self._modules.before_run()
        self.runs += 1
        try:
            return self._replicas.call(fn, args, kwargs)
        except Exception as error:
            if self.num_replicas_in_sync > 1:
                explain_empty_batch(error, (args, kwargs))
            raise

    @not_compiled
    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """Combine what the replicas hold into one value, equal on every rank.

        Called by: every rank, in the same order.   Context: cross-replica or top level.
        Args:
            reduce_op: a `ReduceOp`, or its name in any case.
            value: what `run` returned, or a nest of such values. Where ranks hold one replica each,
                that is a plain value: each rank's counts once.
            axis: None combines element by element, and shapes must match. An axis, or several, is also
                reduced on each replica, where sizes may differ; a mean is over all elements.
        Returns:
            the structure of `value`, on this rank's first device, cut off from autograd. The mean of
            integers is floating.
        Raises:
            ValueError: `axis` is out of range, or the SUM or PRODUCT of a value that is not distributed.
            CollectiveMismatchError: on all ranks, when the ranks' operands differ.
        """
        with spans.current.range("strategy.reduce"):
            require_cross_replica(self, "reduce")
            with self._extended.communicator.raising_together():
                op = ReduceOp.parse(reduce_op)
            flat, label, arrange = _taken_apart(value)
            return arrange(self._extended.cross_replica_ops.reduce(op, flat, axis, label))

    @not_compiled
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate what the replicas hold along `axis`, in replica order, equal on every rank.

        Called by: every rank, in the same order.   Context: cross-replica or top level.
        Args:
            value: what `run` returned, or a nest of such; sizes may differ along `axis` only. `IndexedSlices` are made
                dense.
        Raises:
            ValueError: `axis` is out of range. InvalidArgumentError: shapes differ elsewhere.
            NotImplementedError: for `IndexedSlices` where values of replicas are wrapped, and these are not.
        """
        with spans.current.range("strategy.gather"):
            require_cross_replica(self, "gather")
            flat, label, arrange = _taken_apart(value)
            gather = self._extended.cross_replica_ops.gather
            return arrange([gather(leaf, axis, label) for leaf in flat])

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of `value` on this rank's replicas, as a tuple; (value,) for a plain one."""
        if not self._extended.wraps_values:
            return (value,)
        if isinstance(value, DistributedValues):
            return value.values
        if nest.is_structure(value):
            return tuple(select_replica(i, value) for i in range(self._extended.num_local_replicas))
        return (value,)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """A value per replica of this rank, made by `value_fn(ValueContext)` in replica order."""
        extended = self._extended
        require_cross_replica(self, "experimental_distribute_values_from_function")
        check_call("experimental_distribute_values_from_function", value_fn, (), None)
        contexts = [
            ValueContext(extended.first_replica_id + i, extended.num_replicas_in_sync)
            for i in range(extended.num_local_replicas)
        ]
        values = [value_fn(context) for context in contexts]
        extended.given_steps.distributed = True
        return regroup(values, always_wrap=True) if extended.wraps_values else values[0]

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Give each replica its slice of every global batch that `dataset` yields.

        Called by: every rank.
        Args:
            dataset: a `torch.utils.data.DataLoader` of GLOBAL batches, a `mpistrat.input.BatchedDataset` or
                `FileDataset`, or an iterable of global batches. Of a DataLoader over a map-style dataset, rank
                0's sampler is used by all, and a rank loads only its own replicas' examples. Any other
                iterable is read whole by every rank, and must yield the same batches on each.
            options: among them the auto-shard policy.
        Returns:
            an iterable over steps; each iteration over it is an epoch.
        Raises:
            InvalidArgumentError: fewer files than workers. NotFoundError: AutoShardPolicy.FILE without files.
        """
        return distribute(
            dataset, self._extended, checked_input_options(options, self._extended, False)
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute what `dataset_fn(InputContext)` makes on each rank: batches per REPLICA, already sharded.

        Called by: every rank. Each step takes one batch for each of the rank's replicas, in turn; with
        InputReplicationMode.PER_REPLICA, the function is called for each replica, whose dataset is its own.
        """
        extended = self._extended
        check_call("distribute_datasets_from_function", dataset_fn, (), None)
        checked = checked_input_options(options, extended, True)
        n = extended.num_replicas_in_sync
        contexts = [InputContext(*extended.input.pipelines, n)]
        if checked.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            first = extended.first_replica_id
            contexts = [InputContext(n, first + i, n) for i in range(extended.num_local_replicas)]

        with RaisingOnAll(extended.communicator, "could not make its dataset"):
            datasets = [dataset_fn(context) for context in contexts]
            return distribute_from_function(datasets, extended, checked)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """The old name of `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    # PyTorch

    @not_compiled
    def mirror(self, module: torch.nn.Module) -> torch.nn.Module:
        """Make a torch module's parameters and buffers equal on all ranks: rank 0's.

        For what `scope()` cannot see: modules made outside it, deep-copied at top level, or unpickled,
        hand-made parameters, and `load_state_dict(assign=True)`. Called by: every rank.
        Returns:
            `module`.
        """
        with cross_replica(self, "mirror"):
            self._modules.get().mirror(module)
        return module

    @not_compiled
    def prepare(self, *objects: Any, local_batches: bool = False) -> Any:
        """Distribute what a program trains with: `model, optimizer, loader = prepare(model, optimizer, loader)`.

        Torch modules are mirrored. DataLoaders of GLOBAL batches, `mpistrat.input` datasets and other iterables of
        batches are distributed. Optimizers and schedulers stay as they are; their states move with a module that moves
        to this rank's device. What is prepared already comes back unchanged.

        Called by: every rank.   Context: cross-replica, top level or `replica()`.
        Args:
            local_batches: the loaders give this rank's part already, in batches of a replica's size (through a
                DistributedSampler, or of a shard of its own). They are read as they are, and end with the shortest
                rank's.
        Returns:
            the objects, in their order; a single one itself.
        Raises:
            TypeError, ValueError: on all ranks, for what cannot be prepared, an optimizer of other parameters than
            those of modules that are given, or were mirrored before, or an optimizer, scheduler or gradient scaler that
            differs between ranks: in parameters, their order, options, or how far its state is.
        """
        with cross_replica(self, "prepare"):
            prepared = prepare(self, objects, local_batches)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def shard(self, values: Any, dim: int = 0) -> Any:
        """This replica's contiguous part of each array in a nest: as views, by the rule of global batches.

        Parts are of ceil(size / replicas) each, the last ones shorter or empty: `shard(batch)` is what a distributed
        loader gives. Nothing is communicated, and `values` must be equal on all replicas.

        Context: replica; with one replica per rank also cross-replica and top level.
        Args:
            values: torch, NumPy or CuPy arrays that have a dimension `dim`.
        Raises:
            ValueError: for anything else in the nest. RuntimeError: it is not known for which replica.
        """
        return shard(self, values, dim)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, `backward()` adds to `.grad` on this replica only; the next one outside reduces all of it."""
        return self._modules.get().no_sync()

    def __copy__(self) -> NoReturn:
        raise RuntimeError("a Strategy cannot be copied; pass the object itself")

    def __deepcopy__(self, memo: Any) -> Strategy:
        """Itself: copies of objects that refer to it belong to it, too."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_replicas_in_sync} replicas)"


class _Scope:
    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._modules = strategy, strategy.extended.modules

    def __enter__(self) -> Strategy:
        strategy = self._strategy
        if per_thread.modes:
            mode = per_thread.modes[-1]
            if mode.strategy is not strategy:
                raise RuntimeError(
                    f"the scope of {strategy} was entered inside that of {mode.strategy}; strategies "
                    "must not be mixed: leave the other scope or run first"
                )
            if mode.in_run:
                raise RuntimeError(
                    "scope() was entered inside run; make variables and modules before run, or use "
                    "get_replica_context().merge_call(fn), which is in the scope"
                )
        if at_top_level() and self._modules.are_seen:
            self._modules.get()  # from here on it sees the modules that are built
        self._entered = entered(strategy, None)
        self._entered.__enter__()
        return strategy

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        self._entered.__exit__(exc_type, *exc)
        if at_top_level() and self._modules.made is not None:
            self._modules.made.stop_recording(failed=exc_type is not None)


def _taken_apart(value: Any) -> tuple[list[Any], str, Callable[[list[Any]], Any]]:
    """As `nest.take_apart`; what is no nest has no label."""
    leaves, label, arrange = nest.take_apart(value)
    return leaves, label if nest.is_structure(value) else "", arrange


def _check_run_options(options: Any, rank: int) -> None:
    if not isinstance(options, RunOptions):
        raise TypeError(f"options must be RunOptions or None, got {options!r:.60}")
    warn_of_no_effect(
        "RunOptions",
        "run calls functions as they are, with whatever shapes come; XLA compiles steps for each set of shapes",
        rank,
    )


def checked_input_options(
    options: InputOptions | None, extended: StrategyExtended, from_function: bool
) -> InputOptions:
    """`options`, or the defaults. Raises: what tf.distribute raises for those that do not go together."""
    if not isinstance(options, (InputOptions, type(None))):
        raise TypeError(f"options must be InputOptions or None, got {options!r:.60}")
    options = options or InputOptions()
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if per_replica and not (from_function and extended.input.per_replica):
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is for distribute_datasets_from_function of a MirroredStrategy"
        )
    if options.experimental_place_dataset_on_device:
        if not per_replica:
            raise ValueError(
                "experimental_place_dataset_on_device needs InputReplicationMode.PER_REPLICA"
            )
        if options.experimental_fetch_to_device is not False:
            raise ValueError(
                "experimental_place_dataset_on_device and experimental_fetch_to_device exclude each other"
            )
        warn_of_no_effect(
            "experimental_place_dataset_on_device",
            "datasets are Python's, on the CPU; their batches are copied to the device ahead of each step",
            extended.communicator.rank,
        )
    if from_function and options.experimental_auto_shard_policy is not AutoShardPolicy.AUTO:
        warn_of_no_effect(
            "experimental_auto_shard_policy with distribute_datasets_from_function",
            "the function makes what this rank reads; it may shard by its InputContext",
            extended.communicator.rank,
        )
    return options


def get_strategy() -> Strategy:
    """The strategy in force on this thread; the default strategy if there is none."""
    return context.get_strategy()


_set_scope: _Scope | None = None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Put `strategy` in force for the rest of the program, as if its scope were entered; None ends that.

    Raises:
        RuntimeError: inside `with strategy.scope()` or `run`.
    """
    global _set_scope
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"experimental_set_strategy takes a Strategy or None, got {strategy!r:.60}")
    if _set_scope is not None:
        previous, _set_scope = _set_scope, None
        previous.__exit__(None)
    if per_thread.modes:
        raise RuntimeError(
            "experimental_set_strategy must be called outside every scope(), replica() and run; "
            f"{per_thread.modes[-1].strategy} is in force"
        )
    if strategy is not None:
        scope = _Scope(strategy)
        scope.__enter__()
        _set_scope = scope
