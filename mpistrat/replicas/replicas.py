"""The replicas of one rank: who calls a function on each of them, and where they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat.context import AnyStrategy, entered, per_thread
from mpistrat.machine.devices import current
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.cross_replica_ops import AllReduceCall, CrossReplicaOps
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.local_replicas import LocalReplicas, MergeFunction
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.values import regroup, select_replica


class Replicas:
    """Runs functions on this rank's replicas, one or several that take turns, and combines what they pass.

    Args:
        parameter_device: which has the parameters of torch modules; None is the first replica's.

    Attributes:
        strategy: of the replicas.
        group: all replicas.
        ops: combines values of all replicas.
        devices: of each replica.
        contexts: of each replica.
        count: how often a function is called on this rank for all of its replicas.
        states: what is swapped when one replica's turn ends and another's begins.
        at_turn_end: called before that with the replica's local index, on its thread; they may raise what is wrong with
            what it has done.
        device_of_modules: where torch modules that are made in the scope are put; None, where all is on the host,
            leaves them where they are.
        records_steps: whether what `run` calls is recorded, and computed when it has returned.
    """

    records_steps = False

    def __init__(
        self,
        strategy: AnyStrategy,
        group: ReplicaGroup,
        ops: CrossReplicaOps,
        parameter_device: str | None = None,
    ) -> None:
        self.strategy, self.group, self.ops = strategy, group, ops
        self._is_alone = group.num_replicas_in_sync == 1
        self.count = group.num_local_replicas
        self.devices = group.worker_devices
        parameter_device = parameter_device or group.worker_devices[0]
        on_host = all(d.startswith("cpu") for d in (parameter_device, *group.worker_devices))
        self.device_of_modules = None if on_host else parameter_device
        self._turns = LocalReplicas(self.count)
        self.states = self._turns.states
        self.at_turn_end: list[Callable[[int], None]] = []
        first = group.first_replica_id
        self.contexts = [ReplicaContext(strategy, first + i, i) for i in range(self.count)]

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Call `fn` on each replica of this rank and regroup the results. Communicates nothing."""
        if self.count == 1:
            with entered(self.strategy, self.contexts[0]):
                if args:
                    args = select_replica(0, tuple(args))
                if kwargs:
                    return fn(*args, **select_replica(0, dict(kwargs)))
                return fn(*args)
        outer = per_thread.modes

        def body(index: int) -> Any:
            before, per_thread.modes = per_thread.modes, list(outer)
            try:
                with entered(self.strategy, self.contexts[index]), current(self.devices[index]):
                    result = fn(
                        *select_replica(index, tuple(args)),
                        **select_replica(index, dict(kwargs or {})),
                    )
                    self._end_turn(index)
                    return result
            finally:
                per_thread.modes = before

        return regroup(self._turns.run(body))

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The work of `ReplicaContext.merge_call`."""
        if self.count == 1:
            with entered(self.strategy, None):
                return select_replica(0, merge_fn(self.strategy, *args, **kwargs))

        def merge(operands: list[tuple[Any, ...]]) -> Any:
            grouped, keywords = regroup(operands)
            with entered(self.strategy, None):
                return merge_fn(self.strategy, *grouped, **keywords)

        index = context.local_index
        return select_replica(index, self.meet(index, merge, (args, kwargs)))

    def all_reduce(
        self,
        context: ReplicaContext,
        op: ReduceOp,
        leaves: Sequence[Any],
        options: CommunicationOptions | None,
        label: str,
    ) -> list[Any]:
        """The work of `ReplicaContext.all_reduce` on the leaves of a structure that `label` describes."""
        if self._is_alone:
            return list(leaves)
        ops = self.ops
        if self.count == 1 and ops.custom is None:
            return ops.over_ranks.all_reduce(op, list(zip(leaves)), options, label)

        def merge(strategy: AnyStrategy, calls: Any) -> list[Any]:
            return ops.all_reduce(ops.components(calls), options)

        return self.merge_call(context, merge, (AllReduceCall(op, leaves, label),), {})

    def all_gather(
        self,
        context: ReplicaContext,
        value: Any,
        axis: int,
        options: CommunicationOptions | None,
        label: str = "",
    ) -> Any:
        """The work of `ReplicaContext.all_gather` on one leaf of a structure that `label` describes."""
        if self._is_alone:
            return value
        ops = self.ops

        def merge(strategy: AnyStrategy, value: Any) -> Any:
            return ops.all_gather(ops.components(value), axis, options, label)

        return self.merge_call(context, merge, (value,), {})

    def meet(self, index: int, merge: MergeFunction, operands: Any) -> Any:
        """`merge` of the operands of all `count` calls, once for all. Called by: replica `index`, inside `run`."""
        self._end_turn(index)
        return self._turns.meet(index, merge, operands)

    def _end_turn(self, index: int) -> None:
        for check in self.at_turn_end:
            check(index)

    def sum_of_rank(self, value: Any) -> Any:
        """The sum of what this rank's replicas hold under one name, as cores that run one program do.

        That of 16-bit floats is float32: it is rounded once, after it was summed over ranks.
        """
        return value

    @property
    def device_random_state(self) -> int | None:
        """Of a generator of this rank's device that is not torch's; None where there is none."""
        return None

    def set_device_random_state(self, state: int) -> None:
        """Go on from a `device_random_state`. Called by: the code that has given torch's generators theirs."""

    def explain(self) -> str:
        """What is particular to how these replicas run, for people."""
        return ""
