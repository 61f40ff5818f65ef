"""`Strategy`, the base class of all strategies: its methods are the interface that programs use."""

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
    """The base class of all strategies: runs functions on replicas, keeps their variables, and combines their values.

    A replica is one copy of the model that trains on a part of each batch. Programs make a subclass:
    `MultiWorkerMirroredStrategy` for all ranks, `MirroredStrategy` for the ranks of one node, `OneDeviceStrategy` for
    one device.
    Raises: TypeError if `extended` is no `StrategyExtended`.

    Example:
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.num_replicas_in_sync, strategy.extended.worker_devices, strategy.cluster_resolver
        (2, ('cpu:0', 'cpu:1'), None)
        >>> ids = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
        >>> strategy.reduce("SUM", ids, axis=None)
        1
    """

    # Whether this is the default strategy, in force while a program has entered no strategy.
    is_default = False
    # Number of workers with `num_replicas_in_sync` replicas each; a step combines the gradients of all workers.
    workers_combined = 1
    # The reason why the strategy has no `replica()`, as the end of a sentence; "" if it has `replica()`.
    why_no_replica_block = ""

    def __init__(
        self, extended: StrategyExtended, cluster_resolver: ClusterResolver | None = None
    ) -> None:
        if not isinstance(extended, StrategyExtended):
            raise TypeError(
                f"{type(self).__name__} takes a StrategyExtended, got {extended!r:.60}; to train, make a "
                "MultiWorkerMirroredStrategy, a MirroredStrategy or a OneDeviceStrategy"
            )
        self._extended = extended
        self._cluster_resolver = cluster_resolver
        self._replicas = extended.replicas
        self._modules = extended.modules
        # Number of calls of `run` so far, plus the steps of distributed datasets inside `replica()`. If the ranks'
        # numbers differ in `backward()`, the ranks are in different steps.
        self.runs = 0

    @property
    def extended(self) -> StrategyExtended:
        """The `StrategyExtended` of this strategy: more methods, for algorithms that need to know ranks and devices."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, on all ranks together, that combine their gradients in each step."""
        return self._extended.num_replicas_in_sync

    @property
    def step_examples(self) -> tuple[int, int] | None:
        """The numbers of examples (of this replica, of all replicas) in the last step of a distributed dataset.

        Only steps of iterators that the program still holds count: after an evaluation in mid-epoch, the last step is
        the training step before the evaluation. While gradients are on, a step that was taken inside `torch.no_grad()`
        counts only if there is no other.

        Returns: None if the numbers are not known: outside every iteration over a distributed dataset; if ranks read
            different data (a dataset function, files of each rank, `AutoShardPolicy.OFF`); and outside `run` if this
            rank's replicas have different numbers.

        Example:
            >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> for batch in strategy.experimental_distribute_dataset([np.zeros(8), np.zeros(4)]):
            ...     strategy.step_examples
            (4, 8)
            (2, 4)
        """
        steps = self._extended.given_steps
        examples = steps.examples_with_gradients if gradients_are_on() else steps.examples
        if examples is None:
            return None
        *local, total = examples.tolist()
        # If one call of the function runs several replicas, no single replica is current.
        replica = current_local_replica() if self._replicas.count == len(local) else None
        if replica is None and len(set(local)) > 1:
            return None
        return local[replica or 0], total

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that has found the job's tasks; None for strategies of one process."""
        return self._cluster_resolver

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Return a context manager: variables and torch modules that a program makes inside belong to this strategy.

        The `with` block gets the strategy. At the outermost exit, the parameters and buffers of the torch modules get
        rank 0's values on all ranks, unless the block has raised an error.
        Called by: every rank.
        Raises:
            RuntimeError: on entering inside `run`, or inside another strategy's scope, `replica()` or `run`.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(2, 1)
            ...     ms.get_strategy() is strategy
            True
        """
        return _Scope(self)

    def replica(self) -> ReplicaBlock:
        """Return a context manager that makes the program's own training loop the work of this rank's replica.

        No step function for `run` is needed. Inside, the program may call everything that a replica may call, and also
        everything of the cross-replica context (`next(iterator)`, `reduce`, `gather`, `mirror`, `scope`, checkpoints);
        each such call is a `merge_call`. `run(fn, args)` only calls `fn(*args)`. `backward()` leaves the mean of the
        replicas' gradients in `.grad`, as DistributedDataParallel does. It leaves the sum if the program uses
        `compute_average_loss`, or if the strategy has `gradients="sum"`. A step ends at each `optimizer.step()`. The
        strategy touches neither random-number generators nor threads of the program.

        Called by: every rank.   Context: cross-replica or top level.
        Returns: a context manager; its `with` block gets the `ReplicaContext`.
        Raises:
            RuntimeError: on all ranks, if a rank has several replicas, or with TPUs or parameter servers; inside `run`,
                and in another strategy's scope.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> with strategy.replica() as replica:
            ...     replica.replica_id_in_sync_group
            0
        """
        return ReplicaBlock(self._extended, self.why_no_replica_block)

    def enter_replica(self) -> Self:
        """Make this thread the work of this rank's replica for the rest of the program: enter `replica()`.

        Called by: every rank.   Returns: the strategy.
        Raises: RuntimeError if a rank has several replicas, with TPUs or parameter servers, inside `run`, and in
            another strategy's scope.

        Example:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> with ThreadPoolExecutor(1, initializer=strategy.enter_replica) as thread:  # it stays entered
            ...     thread.submit(ms.in_cross_replica_context).result()
            False

        Example, on several ranks::

            strategy = ms.MultiWorkerMirroredStrategy()
            model, optimizer, loader = strategy.enter_replica().prepare(model, optimizer, loader)
            for images, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        """
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

        `run` itself communicates nothing. But `backward()` checks that all ranks call `run` equally often, so call a
        function that only one rank needs directly, without `run`. An error of `fn` comes out unchanged.

        Called by: every rank, equally often.   Context: cross-replica or top level.
        Args:
            fn: one replica's work; it may call `get_replica_context()`.
            args, kwargs: the arguments of `fn`. A replica gets its component of each distributed value. Variables are
                passed whole, and everything else as it is.
            options: has no effect; it is there for programs of tf.distribute.
        Returns:
            the result of `fn`; with several replicas per rank, a structure of `PerReplica` values.
        Raises:
            RuntimeError: inside `run`, or in another strategy's scope.
            TypeError: `fn` is not callable, or `options` is no `RunOptions`.
            ValueError: `args` is no list or tuple, or `kwargs` is no mapping.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> strategy.run(lambda x, scale: x * scale, args=(3,), kwargs={"scale": 2})
            6
        """
        check_call("run", fn, args, kwargs)
        if in_replica_block(self):
            self._modules.before_run()
            own_args = select_replica(0, tuple(args))
            own_kwargs = select_replica(0, dict(kwargs or {}))
            return fn(*own_args, **own_kwargs)
        if options is not None:
            _check_run_options(options, self._extended.communicator.rank)
        if per_thread.modes:
            require_cross_replica(self, "run")
        # Entering even the empty NO_SPANS would take a sixth of the time of an empty run.
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
        """Reduce the values of all replicas to one value. Every rank gets the same value.

        Called by: every rank, in the same order.   Context: cross-replica or top level.
        Args:
            reduce_op: a `ReduceOp`, or its name in upper or lower case.
            value: a result of `run`, or a nest of results. If each rank has one replica, a result is a plain value, and
                each rank's value counts once.
            axis: None combines the replicas' values element by element, so their shapes must match. With an axis, or
                several, each replica's value is also reduced along these axes. Replicas may have different sizes along
                these axes; a MEAN is then the sum of all elements divided by their number.
        Returns:
            a value, or a nest like `value`, on this rank's first device and without autograd history. The mean of
            integers is a float: float32 for integers of 8 and 16 bits, else float64.
        Raises:
            ValueError: `axis` is out of range, or the operation is SUM or PRODUCT and `value` is not distributed.
            InvalidArgumentError: on all ranks, if a sum of int8, int16, int32 or uint8 does not fit that dtype.
            CollectiveMismatchError: on all ranks, if the ranks' operands differ.
        """
        with spans.current.range("strategy.reduce"):
            require_cross_replica(self, "reduce")
            with self._extended.communicator.raising_together():
                op = ReduceOp.parse(reduce_op)
            flat, label, arrange = _taken_apart(value)
            return arrange(self._extended.cross_replica_ops.reduce(op, flat, axis, label))

    @not_compiled
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' values along `axis`, in the order of replica ids. Every rank gets the result.

        Called by: every rank, in the same order.   Context: cross-replica or top level.
        Args:
            value: a result of `run`, or a nest of results. Replicas may have different sizes along `axis` only.
                `IndexedSlices` become dense.
            axis: the axis of the concatenation; it may be negative.
        Returns: an array, or a nest of arrays like `value`.
        Raises:
            ValueError: `axis` is out of range.
            InvalidArgumentError: sizes differ along another axis.
            NotImplementedError: `value` has `IndexedSlices` outside a distributed value, and the strategy wraps the
                values of replicas.

        Example:
            >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: np.array([ms.get_replica_context().replica_id_in_sync_group]))
            >>> strategy.gather(ids, axis=0)
            array([0, 1])
        """
        with spans.current.range("strategy.gather"):
            require_cross_replica(self, "gather")
            flat, label, arrange = _taken_apart(value)
            gather = self._extended.cross_replica_ops.gather
            return arrange([gather(leaf, axis, label) for leaf in flat])

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple of this rank's replicas' components of `value`; (value,) if `value` has no components.

        For a nest with distributed values, an entry is a nest of one replica's components.

        Example:
            >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
            >>> strategy.experimental_local_results(ids), strategy.experimental_local_results("plain")
            ((0, 1), ('plain',))
        """
        extended = self._extended
        if extended.wraps_values:
            if isinstance(value, DistributedValues):
                return value.values
            if nest.is_structure(value):
                return tuple(select_replica(i, value) for i in range(extended.num_local_replicas))
        return (value,)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Call `value_fn(ValueContext)` once for each replica of this rank, in the order of replica ids.

        Context: cross-replica or top level.
        Returns: a `PerReplica` of the results; the plain result if the strategy does not wrap values, as with one
            replica per rank.
        Raises: RuntimeError inside `run`, or in another strategy's scope; TypeError if `value_fn` is not callable.

        Example:
            >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
            PerReplica:{ 0: 0, 1: 1 }
        """
        extended = self._extended
        require_cross_replica(self, "experimental_distribute_values_from_function")
        check_call("experimental_distribute_values_from_function", value_fn, (), None)
        contexts = [
            ValueContext(extended.first_replica_id + i, extended.num_replicas_in_sync)
            for i in range(extended.num_local_replicas)
        ]
        values = [value_fn(context) for context in contexts]
        extended.given_steps.distributed = True
        if extended.wraps_values:
            return regroup(values, always_wrap=True)
        return values[0]

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return a dataset that gives each replica its part of every global batch of `dataset`.

        Called by: every rank.
        Args:
            dataset: a `torch.utils.data.DataLoader` of GLOBAL batches, a `mpistrat.input.BatchedDataset` or
                `FileDataset`, or an iterable of global batches. For a DataLoader over a map-style dataset, all ranks
                use rank 0's sampler, and each rank loads only the examples of its own replicas. Every rank reads any
                other iterable whole, and it must yield the same batches on each rank.
            options: the auto-shard policy and other options; None means the defaults.
        Returns:
            an iterable over steps; each iteration over it is an epoch.
        Raises:
            InvalidArgumentError: there are fewer files than workers.
            NotFoundError: `options` ask for AutoShardPolicy.FILE, and `dataset` has no files.
            NotImplementedError: `options` ask for InputReplicationMode.PER_REPLICA. It needs a dataset function.

        Example:
            >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> for batch in strategy.experimental_distribute_dataset([np.arange(4), np.arange(6)]):
            ...     strategy.experimental_local_results(batch)
            (array([0, 1]), array([2, 3]))
            (array([0, 1, 2]), array([3, 4, 5]))
        """
        return distribute(
            dataset, self._extended, checked_input_options(options, self._extended, False)
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return a dataset of the batches that `dataset_fn` makes on each rank. Each batch is for one REPLICA.

        Each step takes the next batch for the rank's first replica, then the next batch for its second, and so on. No
        batch is split, so `dataset_fn` must give each rank different examples.

        Called by: every rank.
        Args:
            dataset_fn: makes this rank's dataset from an `InputContext`. With InputReplicationMode.PER_REPLICA, it is
                called once for each replica, and makes the replica's own dataset.
            options: None means the defaults.
        Returns: an iterable over steps.
        Raises: an error of `dataset_fn` is raised on all ranks.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> dataset_fn = lambda context: [np.zeros(context.get_per_replica_batch_size(3))]
            >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
            ...     batch
            array([0., 0., 0.])
        """
        extended = self._extended
        check_call("distribute_datasets_from_function", dataset_fn, (), None)
        checked = checked_input_options(options, extended, True)
        n = extended.num_replicas_in_sync
        contexts = [InputContext(*extended.input.pipelines, n)]
        if checked.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            first = extended.first_replica_id
            replicas = range(first, first + extended.num_local_replicas)
            contexts = [InputContext(n, replica, n) for replica in replicas]

        with RaisingOnAll(extended.communicator, "could not make its dataset"):
            datasets = [dataset_fn(context) for context in contexts]
            return distribute_from_function(datasets, extended, checked)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """The old name of `distribute_datasets_from_function`.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> list(strategy.experimental_distribute_datasets_from_function(lambda context: [np.zeros(2)]))
            [array([0., 0.])]
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    # PyTorch

    @not_compiled
    def mirror(self, module: torch.nn.Module) -> torch.nn.Module:
        """Give a torch module's parameters and buffers rank 0's values on all ranks, in place.

        Needed for modules that `scope()` does not see: modules that are made outside the scope, deep-copied at top
        level or unpickled, modules with hand-made parameters, and modules after `load_state_dict(assign=True)`.

        Called by: every rank.
        Args: module: a module, a parameter, or an iterable of them.
        Returns: `module`.
        Raises: RuntimeError inside `run`, or in another strategy's scope; TypeError for another object; ValueError for
            a tensor that an operation has made, or for torch's own data parallelism.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> strategy.mirror(torch.nn.Linear(2, 1))
            Linear(in_features=2, out_features=1, bias=True)
        """
        with cross_replica(self, "mirror"):
            self._modules.get().mirror(module)
        return module

    @not_compiled
    def prepare(self, *objects: Any, local_batches: bool = False) -> Any:
        """Prepare models, optimizers and loaders for training: `model, optimizer, loader = prepare(…)`.

        Torch modules are mirrored. DataLoaders of GLOBAL batches, `mpistrat.input` datasets and other iterables of
        batches are distributed. Optimizers and schedulers stay the same objects; their states move with a module that
        moves to this rank's device. An object that is prepared already comes back unchanged.

        Called by: every rank.   Context: cross-replica, top level or `replica()`.
        Args:
            objects: modules, optimizers, schedulers, gradient scalers, loaders and datasets, in any order.
            local_batches: whether the loaders already give this rank's part, in batches of a replica's size (through a
                DistributedSampler, or from a shard of the rank's own). Such loaders are read as they are, and an epoch
                ends when the shortest rank's loader ends.
        Returns:
            a tuple of the prepared objects, in their order; for a single object, the object.
        Raises:
            TypeError, ValueError: on all ranks, for an object that cannot be prepared; for an optimizer with parameters
            of a module that is neither given nor mirrored; for an optimizer, scheduler or gradient scaler that differs
            between ranks in its parameters, their order, its options or the progress of its state.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> model, optimizer, loader = strategy.prepare(model, optimizer, [torch.zeros(4, 2)])
            >>> [strategy.run(model, args=(batch,)).shape for batch in loader]
            [torch.Size([4, 1])]
        """
        with cross_replica(self, "prepare"):
            prepared = prepare(self, objects, local_batches)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def shard(self, values: Any, dim: int = 0) -> Any:
        """Return this replica's contiguous part of each array in `values`.

        A part has ceil(size / replicas) elements along `dim`; the last parts may be shorter or empty. Distributed
        loaders split global batches by the same rule. Nothing is communicated, so the program must give the same
        `values` on all replicas.

        Context: replica; with one replica per rank also cross-replica and top level.
        Args:
            values: a nest of torch, NumPy or CuPy arrays that have a dimension `dim`, of one size.
            dim: the dimension that is split.
        Returns: a nest like `values`; its arrays are views of the arrays in `values`.
        Raises:
            ValueError: the nest has another leaf, an array without `dim`, or arrays of several sizes there.
            RuntimeError: the rank has several replicas, and the call is in none of them.

        Example:
            >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.run(lambda: strategy.shard(torch.arange(5)))
            PerReplica:{ 0: tensor([0, 1, 2]), 1: tensor([3, 4]) }
        """
        return shard(self._replicas, self._extended.input.share, values, dim)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around `backward()`: inside, gradients are added to `.grad` and not communicated.

        The next `backward()` outside reduces the accumulated gradients over all replicas.

        Example:
            >>> strategy = ms.OneDeviceStrategy("cpu")
            >>> model = strategy.mirror(torch.nn.Linear(2, 1))
            >>> with strategy.no_sync():
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model.bias.grad
            tensor([1.])
        """
        return self._modules.get().no_sync()

    def __copy__(self) -> NoReturn:
        raise RuntimeError("a Strategy cannot be copied; pass the object itself")

    def __deepcopy__(self, memo: Any) -> Strategy:
        """Return the strategy itself, so that deep copies of objects that refer to it still belong to it."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_replicas_in_sync} replicas)"


class _Scope:
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._modules = strategy.extended.modules

    def __enter__(self) -> Strategy:
        strategy = self._strategy
        if per_thread.modes:
            mode = per_thread.modes[-1]
            if mode.strategy is not strategy:
                raise RuntimeError(
                    f"the scope of {strategy} was entered while {mode.strategy} is in force; strategies "
                    "must not be mixed: leave the other scope or run first"
                )
            if mode.in_run:
                raise RuntimeError(
                    "scope() was entered inside run; make variables and modules before run, or use "
                    "get_replica_context().merge_call(fn), which is in the scope"
                )
        if at_top_level() and self._modules.are_seen:
            self._modules.get()  # from now on the strategy sees each torch module that is built
        self._entered = entered(strategy, strategy.extended.replicas, None)
        self._entered.__enter__()
        return strategy

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        self._entered.__exit__(exc_type, *exc)
        if at_top_level() and self._modules.made is not None:
            self._modules.made.stop_recording(failed=exc_type is not None)


def _taken_apart(value: Any) -> tuple[list[Any], str, Callable[[list[Any]], Any]]:
    """Return the leaves of `value`, a label for errors, and a function that rebuilds the nest from new leaves.

    The label is "" if `value` is no nest.
    """
    leaves, label, arrange = nest.take_apart(value)
    if not nest.is_structure(value):
        label = ""
    return leaves, label, arrange


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
    """Return `options`, or default options if it is None. Warn once on rank 0 about options that have no effect.

    Args: from_function: whether the dataset comes from a dataset function.
    Raises: as tf.distribute does, TypeError if `options` is no `InputOptions`; NotImplementedError if PER_REPLICA is
        asked for without a dataset function, or by a strategy that cannot do it; ValueError for options that exclude
        each other.
    """
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
            "the function makes this rank's own dataset; it may shard by its InputContext",
            extended.communicator.rank,
        )
    return options


def get_strategy() -> Strategy:
    """Return the strategy in force on this thread; the default strategy if the program has entered none.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     ms.get_strategy() is strategy
        True
    """
    return context.get_strategy()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter the scope of `strategy` on this thread, until the next call of this function.

    A call first leaves the scope that the last call has entered.
    Args: strategy: None to enter no scope.
    Raises:
        RuntimeError: inside `with strategy.scope()`, `replica()` or `run`.
        TypeError: `strategy` is neither a `Strategy` nor None.

    Example:
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> ms.experimental_set_strategy(strategy)
        >>> ms.get_strategy() is strategy
        True
        >>> ms.experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"experimental_set_strategy takes a Strategy or None, got {strategy!r:.60}")
    previous = per_thread.set_scope
    # If this function has set a scope, the first mode is that scope's own.
    if modes := per_thread.modes[previous is not None :]:
        raise RuntimeError(
            "experimental_set_strategy must be called outside every scope(), replica() and run; "
            f"{modes[-1].strategy} is in force"
        )
    if previous is not None:
        previous.__exit__(None)
        per_thread.set_scope = None
    if strategy is not None:
        scope = _Scope(strategy)
        scope.__enter__()
        per_thread.set_scope = scope
