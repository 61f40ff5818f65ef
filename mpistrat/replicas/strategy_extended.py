"""`StrategyExtended`: what algorithms that are aware of the distribution ask of a strategy.

`Strategy` is the face of a program. Strategies differ in their parts: how replicas run, how variables are kept, what a
rank does for checkpoints, what it reads, and what is done about torch modules.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpistrat.context import (
    AnyStrategy,
    check_call,
    entered,
    get_replica_context,
    has_strategy,
    per_thread,
    require_cross_replica,
)
from mpistrat.cross_device_ops.cross_device_ops import check_pairs
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from mpistrat.replicas.checkpoint_role import CheckpointRole
from mpistrat.replicas.first_step_notice import FirstStepNotice
from mpistrat.replicas.given_steps import GivenSteps
from mpistrat.replicas.input_plan import InputPlan
from mpistrat.replicas.multi_step import MultiStepContext
from mpistrat.replicas.sharded_arrays import ShardedArrays
from mpistrat.replicas.torch_modules import TorchModules
from mpistrat.values import DistributedValues, Mirrored, select_replica
from mpistrat.variables.store import VariableStore
from mpistrat.variables.variable import Variable
from mpistrat.variables.variable_arguments import checked_arguments


class Parts(NamedTuple):
    """The parts in which strategies differ; the `…_parts` module of a strategy's room puts them together.

    Attributes:
        between_graph: whether each rank runs a program of its own.
        wraps_values: whether the components of values are wrapped: one-replica strategies never do.
    """

    modules: TorchModules
    variables: VariableStore
    input: InputPlan
    checkpoints: CheckpointRole = CheckpointRole()
    between_graph: bool = False
    wraps_values: bool = True


class StrategyExtended(abc.ABC):
    """Additional methods for algorithms that need to be aware of the distribution.

    Attributes:
        communicator, worker_devices, num_local_replicas, num_replicas_in_sync, replicas_of_ranks, first_replica_id,
            deterministic, topology: as of `ReplicaGroup`.
        replicas: runs functions on this rank's replicas.
        cross_replica_ops: how values of all replicas are combined.
        variables: how variables are kept.
        checkpoints: what this rank does for checkpoints.
        input: what this rank reads.
        modules: what is done about torch modules.
        wraps_values: as of `Parts`.
        given_steps: of distributed datasets, on this rank.
        sharded: what `Strategy.shard` has cut, on this rank.
        first_step_notice: says at the first step how many ranks work together.
        experimental_between_graph: whether each rank runs a program of its own.
        experimental_should_init: whether this rank makes the first values of variables.
        experimental_require_static_shapes: whether shapes must not depend on values.
        should_save_summary: whether this rank is the one to write logs.
    """

    experimental_require_static_shapes = False

    def __init__(self, strategy: AnyStrategy, parts: Parts) -> None:
        self.strategy = strategy
        self.modules, self.variables, self.input, self.checkpoints = parts[:4]
        self._between_graph, self.wraps_values = parts.between_graph, parts.wraps_values
        self.replicas = self.modules.parts.replicas
        self.cross_replica_ops, group = self.replicas.ops, self.replicas.group
        self.communicator = group.communicator
        self.replicas_of_ranks = group.replicas_of_ranks
        self.num_local_replicas = group.num_local_replicas
        self.num_replicas_in_sync = replicas = group.num_replicas_in_sync
        rank, size = self.communicator.rank, self.communicator.size
        self.given_steps = GivenSteps(replicas, size, is_first_rank=rank == 0)
        self.sharded = ShardedArrays(replicas, self.given_steps.tell_once)
        self.first_step_notice = FirstStepNotice(group)
        self.first_replica_id = group.first_replica_id
        self.deterministic, self.topology = group.deterministic, group.topology

    @property
    def experimental_between_graph(self) -> bool:
        return self._between_graph

    @abc.abstractmethod
    def check_destination(self, destinations: Any) -> None:
        """Raises: ValueError where nothing can be reduced to `destinations`, a device or a distributed value."""

    @property
    def experimental_should_init(self) -> bool:
        return self.variables.owns_initial_values

    @property
    def should_save_summary(self) -> bool:
        return self.variables.owns_initial_values and self.communicator.rank == 0

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is the one to save checkpoints."""
        return self.checkpoints.saves and self.communicator.rank == 0

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """This rank's devices, one replica each."""
        return self.replicas.group.worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables."""
        return self.variables.devices

    def explain(self) -> str:
        """By which ways values are combined over ranks, and what memory that takes. Not collective."""
        lines = [self.communicator.explain(), self.modules.explain()]
        if self.deterministic:
            lines.append(
                f"deterministic: {self.num_replicas_in_sync} replicas are added up in the order of their ids; "
                f"intra-op threads: {self.replicas.group.fixed_threads}"
            )
        lines.append(self.replicas.explain())
        return "\n".join(filter(None, lines))

    def state_dict(self) -> dict[str, Any]:
        """What must stay the same for a deterministic job to go on with the same bits: save it. Not collective."""
        return {
            "deterministic": self.deterministic,
            "num_replicas_in_sync": self.num_replicas_in_sync,
            "intra_op_threads": self.replicas.group.fixed_threads,
        }

    def state_schema(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a state looks like: see `checkpoint.schema`. Not collective."""
        count = range(1, 1 << 31)
        return {
            "deterministic": bool,
            "num_replicas_in_sync": count,
            "intra_op_threads": (count, None),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a job that was deterministic goes on as it was. Nothing is changed, and nothing sent.

        Args:
            state: of `state_dict`, by any number of ranks; equal on all of them.
        Raises:
            ValueError: this job would go on with other bits.
        """
        current = self.state_dict()
        if state["deterministic"] and dict(state) != current:
            raise ValueError(
                f"the saved job was deterministic, with {dict(state)}; this one is {current}, and would go on with "
                "other bits. Start it with as many replicas in all (ranks times devices=), deterministic=True, and "
                f"OMP_NUM_THREADS={state['intra_op_threads']}; or leave this check out (of a "
                "Checkpoint: del checkpoint.objects['strategy'])"
            )

    def seconds_waited(self, last: int = 60) -> list[float]:
        """How long each rank waited for the others to enter collectives; the slowest rank waited least.

        Called by: all ranks. With `check="never"` nothing is measured.
        Args:
            last: of how many seconds until now, at most 63.
        Returns: seconds, by rank.
        """
        return self.communicator.all_gather_object(
            self.communicator.contract.seconds_waited(last), label="seconds_waited"
        )

    # Running

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `fn` on each replica of this rank and regroup the results. Communicates nothing."""
        return self.replicas.call(fn, args, kwargs)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call `fn(context, next(iterator))` `iterations` times, in the scope; returns the context.

        Called by: every rank.   Context: cross-replica or top level.
        """
        require_cross_replica(self.strategy, "experimental_run_steps_on_iterator")
        context = MultiStepContext(initial_loop_values)
        with entered(self.strategy, None):
            for _ in range(iterations):
                fn(context, next(iterator))
        return context

    # Variables

    def create_variable(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> Variable:
        """The work of `mpistrat.Variable(...)`, in the scope or inside run. Called by every rank."""
        with self.communicator.raising_together():
            asked = checked_arguments(
                initial_value, trainable, name, dtype, synchronization, aggregation, shape
            )

        def create(strategy: AnyStrategy, initial: Any) -> Variable:
            return self.variables.create(asked._replace(initial_value=select_replica(0, initial)))

        context = get_replica_context() if has_strategy() else None
        if context is None:
            return create(self.strategy, initial_value)
        return context.merge_call(create, (initial_value,))

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Whether `variable` was made in this strategy's scope."""
        return getattr(self.value_container(variable), "strategy", None) is self.strategy

    def value_container(self, value: Any) -> Any:
        """The distributed variable that the component `value` belongs to; else `value` itself."""
        return getattr(value, "_container", None) or value

    def read_var(self, variable: Any) -> Any:
        """`variable`'s value; for an ON_READ variable its copies combined."""
        if not hasattr(variable, "read_value"):
            raise TypeError(f"read_var takes a variable, got {variable!r:.60}")
        return variable.read_value()

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Inside, variables are placed with another variable of this strategy."""
        mode = per_thread.modes[-1] if per_thread.modes else None
        if mode is None or mode.strategy is not self.strategy:
            raise RuntimeError("colocate_vars_with must be called inside this strategy's scope()")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "colocate_vars_with needs a variable made in this strategy's scope, got "
                f"{colocate_with_variable!r:.60}"
            )
        with self.variables.colocated(colocate_with_variable):
            yield

    def update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(component, *args, **kwargs)` for every copy of `variable` on this rank.

        Context: cross-replica; inside run, all replicas call it and their arguments are regrouped.
        Returns:
            `Mirrored` of the results, or their tuple with `group=False`.
        """
        check_call("update", fn, args, kwargs)
        keywords = dict(kwargs or {})
        context = get_replica_context() if has_strategy() else None
        if context is not None:

            def merge(strategy: AnyStrategy, *merged: Any, **merged_keywords: Any) -> Any:
                return self.update(variable, fn, merged, merged_keywords, group)

            return context.merge_call(merge, tuple(args), keywords)
        require_cross_replica(self.strategy, "update")
        return self._on_each(self.variables.copies(variable), fn, tuple(args), keywords, group)

    def _on_each(
        self,
        components: Sequence[Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        results = []
        for i, component in enumerate(components):
            per_thread.updated_replica = i
            try:
                call_args, call_kwargs = select_replica(i, (args, kwargs))
                results.append(fn(component, *call_args, **call_kwargs))
            finally:
                per_thread.updated_replica = None
        if not group:
            return tuple(results)
        return results[0] if len(results) == 1 else Mirrored(results)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(*args, **kwargs)` once for each device in `colocate_with`. Context: cross-replica."""
        require_cross_replica(self.strategy, "update_non_slot")
        check_call("update_non_slot", fn, args, kwargs)
        devices = colocate_with if isinstance(colocate_with, (list, tuple)) else (colocate_with,)
        return self._on_each(
            devices, lambda _, *a, **k: fn(*a, **k), tuple(args), dict(kwargs or {}), group
        )

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        """Where state that belongs to no single one of `variables` is kept."""
        return self.variables.non_slot_devices(variables)

    # Combining

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine `value` over all replicas and put the result on `destinations`.

        Called by: every rank.   Context: cross-replica.
        Args:
            value: per-replica components; a mirrored value is its own mean.
            destinations: a device's name, or a distributed value or variable whose devices are meant.
        Returns:
            an array for one device, `Mirrored` for several.
        """
        require_cross_replica(self.strategy, "reduce_to")
        with self.communicator.raising_together():
            if isinstance(destinations, (list, tuple)):
                raise AssertionError(
                    "destinations must be one distributed value or device, got a list: "
                    f"{destinations!r:.60}"
                )
            op = _parsed(reduce_op)
            self.check_destination(destinations)
        return self.cross_replica_ops.reduce_to(op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce_to` for many (value, destinations) pairs in one collective; results in order."""
        require_cross_replica(self.strategy, "batch_reduce_to")
        with self.communicator.raising_together():
            op = _parsed(reduce_op)
            check_pairs(value_destination_pairs)
            for _, destinations in value_destination_pairs:
                self.check_destination(destinations)
        pairs = list(value_destination_pairs)
        if self.variables.on_every_replica:
            # The result is on every device, whatever single device was asked for.
            for i, (value, to) in enumerate(pairs):
                if isinstance(to, str) and isinstance(value, DistributedValues):
                    pairs[i] = (value, value)
        return self.cross_replica_ops.batch_reduce(op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies of `tensor` on `destinations`; numbers come back as they are. Context: cross-replica."""
        require_cross_replica(self.strategy, "broadcast_to")
        if destinations is None:
            raise AssertionError("broadcast_to needs destinations: a device or a distributed value")
        if isinstance(tensor, (int, float)):
            return tensor
        return self.cross_replica_ops.broadcast(tensor, destinations)


def _parsed(reduce_op: Any) -> ReduceOp:
    if isinstance(reduce_op, VariableAggregation):
        raise AssertionError(f"reduce_op must be a ReduceOp, got {reduce_op}")
    return ReduceOp.parse(reduce_op)
