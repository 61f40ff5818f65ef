"""The replicas of one rank: `Replicas` calls functions on each replica, and combines their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat.context import AnyStrategy, entered, per_thread
from mpistrat.cross_device_ops import accumulation
from mpistrat.machine.devices import current
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.cross_replica_ops import AllReduceCall, CrossReplicaOps
from mpistrat.replicas.first_step_notice import FirstStepNotice
from mpistrat.replicas.given_steps import GivenSteps, ShardedArrays
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.local_replicas import LocalReplicas, MergeFunction
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.values import regroup, select_replica


class Replicas:
    """Runs functions on this rank's replicas, and combines the replicas' values. Several replicas take turns.

    Args:
        parameter_device: the device of the parameters of torch modules; None: the first replica's device.

    Attributes:
        strategy: the strategy of the replicas.
        group: all replicas of all ranks.
        ops: combines values of all replicas.
        devices: the device of each replica of this rank.
        contexts: the context of each replica of this rank.
        count: number of times that `run` calls its function on this rank.
        states: states that are swapped when one replica's turn ends and another's begins. A turn is a replica's work up
            to the next `merge_call`, or to the end of the run.
        at_turn_end: functions that are called at the end of each turn with the replica's local index, on its thread.
            The functions may raise an error about the turn.
        given_steps: the steps that distributed datasets have given on this rank.
        sharded: the arrays that `Strategy.shard` has cut on this rank.
        first_step_notice: prints at the first step how many ranks work together.
        modules: the `TorchModules` of these replicas; it sets this attribute when it is made.
        device_of_modules: the device for torch modules that are made in the scope. None: all devices are the host, and
            modules stay where they are.
        records_steps: whether `run` first records the operations of a function, and computes them once it has returned.
    """

    records_steps = False

    def __init__(
        self,
        strategy: AnyStrategy,
        group: ReplicaGroup,
        ops: CrossReplicaOps,
        parameter_device: str | None = None,
    ) -> None:
        self.strategy = strategy
        self.group = group
        self.ops = ops
        self.count = group.num_local_replicas
        self.devices = group.worker_devices
        parameter_device = parameter_device or group.worker_devices[0]
        devices = [parameter_device, *group.worker_devices]
        kinds = {device.partition(":")[0] for device in devices}
        self.device_of_modules = None if kinds == {"cpu"} else parameter_device
        communicator = group.communicator
        replicas = group.num_replicas_in_sync
        self.given_steps = GivenSteps(
            replicas, communicator.size, is_first_rank=communicator.rank == 0
        )
        self.sharded = ShardedArrays(replicas, self.given_steps.tell_once)
        self.first_step_notice = FirstStepNotice(group)
        self.modules: Any = None
        self._is_alone = replicas == 1
        self._turns = LocalReplicas(self.count)
        self.states = self._turns.states
        self.at_turn_end: list[Callable[[int], None]] = []
        first = group.first_replica_id
        self.set_contexts([ReplicaContext(strategy, first + i, i) for i in range(self.count)])

    def set_contexts(self, contexts: list[ReplicaContext]) -> None:
        """Let `contexts` be the contexts of this rank's replicas."""
        self.contexts = contexts
        for context in contexts:
            context.replicas = self

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Call `fn` on each replica of this rank and regroup the results. Communicates nothing.

        Args: args, kwargs: arguments of `fn`. Each replica gets its own component of each distributed value in them.
        Returns: with one replica, the result of `fn`; else a structure of `PerReplica` values.
        """
        if self.count == 1:
            with entered(self.strategy, self, self.contexts[0]):
                if args:
                    args = select_replica(0, tuple(args))
                if kwargs:
                    return fn(*args, **select_replica(0, dict(kwargs)))
                return fn(*args)
        outer = per_thread.modes

        def body(index: int) -> Any:
            before = per_thread.modes
            per_thread.modes = list(outer)
            try:
                context = self.contexts[index]
                with entered(self.strategy, self, context), current(self.devices[index]):
                    own_args = select_replica(index, tuple(args))
                    own_kwargs = select_replica(index, dict(kwargs or {}))
                    result = fn(*own_args, **own_kwargs)
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
        """Call `merge_fn` once for all replicas of this rank, and return this replica's part of its result.

        Called by: `ReplicaContext.merge_call`, on every replica of this rank, after the checks of its arguments.
        """
        if self.count == 1:
            with entered(self.strategy, self, None):
                return select_replica(0, merge_fn(self.strategy, *args, **kwargs))

        def merge(operands: list[tuple[Any, ...]]) -> Any:
            grouped, keywords = regroup(operands)
            with entered(self.strategy, self, None):
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
        """Return the reduced leaves of a structure that `label` describes: see `ReplicaContext.all_reduce`."""
        if self._is_alone:
            return [accumulation.of_one_replica(op, leaf) for leaf in leaves]
        ops = self.ops
        if self.count == 1 and ops.custom is None:
            return ops.over_ranks.all_reduce(op, list(zip(leaves)), options, label)

        def merge(strategy: AnyStrategy, calls: Any) -> list[Any]:
            return ops.all_reduce(ops.components(calls), options)

        call = AllReduceCall(op, leaves, label)
        return self.merge_call(context, merge, (call,), {})

    def all_gather(
        self,
        context: ReplicaContext,
        value: Any,
        axis: int,
        options: CommunicationOptions | None,
        label: str = "",
    ) -> Any:
        """Return one gathered leaf of a structure that `label` describes: see `ReplicaContext.all_gather`."""
        if self._is_alone:
            return value
        ops = self.ops

        def merge(strategy: AnyStrategy, value: Any) -> Any:
            return ops.all_gather(ops.components(value), axis, options, label)

        return self.merge_call(context, merge, (value,), {})

    def meet(self, index: int, merge: MergeFunction, operands: Any) -> Any:
        """Wait until all replicas of this rank have called this. Returns: the result of `merge`, to every replica.

        Only replica 0's `merge` is called, once. It gets a list of all `operands`, in replica order.

        Called by: replica `index`, inside `run`; for example in `merge_call` and in `backward()`.
        """
        self._end_turn(index)
        return self._turns.meet(index, merge, operands)

    def _end_turn(self, index: int) -> None:
        for check in self.at_turn_end:
            check(index)

    def sum_of_rank(self, value: Any) -> Any:
        """Return the sum of `value` over this rank's TPU cores, if they run one program for all; else `value` itself.

        Over cores, the sum of 16-bit floats is float32, so that it is rounded once, after the sum over ranks.
        """
        return value

    @property
    def device_random_state(self) -> int | None:
        """The state of this rank's device generator, if torch does not keep it (XLA); None without such a generator."""
        return None

    def set_device_random_state(self, state: int) -> None:
        """Set the device's generator to a value of `device_random_state`.

        Called by: the checkpoint's code for random states, after it has set torch's generators, because these seed the
            device's.
        """

    def explain(self) -> str:
        """Describe how these replicas run, for `StrategyExtended.explain`; "" if there is nothing particular."""
        return ""
