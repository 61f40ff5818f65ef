"""What a strategy means by running and reducing, and with `strategy_variables` by variables: `StrategyExtended`.

`Strategy` is the face; this is where strategies differ. The class here serves every strategy whose
replicas hold copies: k replicas on each of `communicator.size` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.communicators import Communicator
from mpistrat.context import entered, per_thread, require_cross_replica
from mpistrat.cross_device_ops import CrossDeviceOps
from mpistrat.cross_device_ops.cross_device_ops import check_pairs
from mpistrat.input.splitting import Share
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp, VariableAggregation
from mpistrat.replicas.cross_replica_ops import AllReduceCall, CrossReplicaOps
from mpistrat.replicas.local_replicas import LocalReplicas
from mpistrat.replicas.multi_step import MultiStepContext
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.strategies.checkpoints import CheckpointRole
from mpistrat.strategies.variable_creation import StrategyVariables
from mpistrat.values import DistributedValues, regroup, select_replica

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.piggyback import Piggyback
    from mpistrat.strategy import Strategy


class StrategyExtended(CheckpointRole, StrategyVariables):
    """Additional methods for algorithms that need to be aware of the distribution.

    Args:
        strategy: the face.
        communicator: the ranks that take part.
        worker_devices: this rank's devices, one replica each.
        cross_device_ops: a policy of the user's, or None.
        options: defaults of every collective.
        fixed_threads: how many intra-op threads every rank computes with, if results are not to depend on how replicas
            are spread over ranks; else None.
        replicas_of_ranks: how many replicas each rank has, in rank order; None where each has as many as this one.

    Attributes:
        communicator, worker_devices: as given.
        num_local_replicas: k, this rank's replicas.
        replicas_of_ranks: as given.
        replicas: runs them; `replicas.count` is how often a function is called here for all k.
        num_replicas_in_sync: replicas over all ranks.
        first_replica_id: the global id of this rank's first replica; ids go on from rank to rank.
        cross_replica_ops: how values of all replicas are combined.
        deterministic: whether results do not depend on how replicas are spread over ranks.
        piggybacks: add words to the agreement before gradients are reduced; equally many on every rank.
    """

    experimental_between_graph = False
    experimental_should_init = True
    experimental_require_static_shapes = False
    # Whether the components of values are wrapped: one-replica strategies never do.
    wraps_values = True
    # Whether a distributed dataset makes a step as long as any replica has data.
    has_partial_steps = True
    # Whether an input function may be called once for each replica.
    reads_per_replica = True
    # Where torch modules that are made in the scope are put; None leaves them where they are.
    device_of_modules: str | None = None
    # Whether what `run` calls is recorded, and computed when it has returned.
    records_steps = False

    def __init__(
        self,
        strategy: Strategy,
        communicator: Communicator,
        worker_devices: Sequence[str],
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        fixed_threads: int | None = None,
        replicas_of_ranks: tuple[int, ...] | None = None,
    ) -> None:
        if not isinstance(communicator, Communicator):
            raise TypeError(f"communicator must be a Communicator, got {communicator!r:.60}")
        self.replicas_of_ranks = replicas_of_ranks or (len(worker_devices),) * communicator.size
        self.num_replicas_in_sync = sum(self.replicas_of_ranks)
        self.first_replica_id = sum(self.replicas_of_ranks[: communicator.rank])
        self.deterministic = fixed_threads is not None
        self._fixed_threads = fixed_threads
        cross_replica_ops = CrossReplicaOps(
            communicator,
            self.replicas_of_ranks,
            cross_device_ops,
            options or CommunicationOptions(),
            self.deterministic,
        )
        super().__init__(strategy, communicator, worker_devices, cross_replica_ops)
        self.piggybacks: list[Piggyback] = []
        self.replicas = LocalReplicas(self.num_local_replicas)
        self._contexts = [
            ReplicaContext(strategy, self.first_replica_id + i, i)
            for i in range(self.num_local_replicas)
        ]

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank is the one to write logs: the first."""
        return self.communicator.rank == 0

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables."""
        return self.worker_devices

    @property
    def input_pipelines(self) -> tuple[int, int]:
        """How many input pipelines there are, and which of them is this rank's."""
        return self.communicator.size, self.communicator.rank

    def input_share(self) -> Share:
        """Which part of the input this rank reads: all ranks together are one worker."""
        first = self.first_replica_id
        mine = range(first, first + self.num_local_replicas)
        return Share(1, 0, self.num_replicas_in_sync, mine)

    @property
    def input_devices(self) -> tuple[str, ...]:
        """To which devices a distributed dataset brings batches, by local replica; none where they stay."""
        return self.worker_devices

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
        """Go on from a `device_random_state`. Called by: who has given torch's generators theirs."""

    def explain(self) -> str:
        """By which ways values are combined over ranks, and what memory that takes. Not collective."""
        mirroring = self.strategy._mirroring
        told = [self.communicator.explain(), "" if mirroring is None else mirroring.explain()]
        if self.deterministic:
            told.append(
                f"deterministic: {self.num_replicas_in_sync} replicas are added up in the order of their ids; "
                f"intra-op threads: {self._fixed_threads}"
            )
        return "\n".join(filter(None, told))

    def state_dict(self) -> dict[str, Any]:
        """What must stay the same for a deterministic job to go on with the same bits: save it. Not collective."""
        return {
            "deterministic": self.deterministic,
            "num_replicas_in_sync": self.num_replicas_in_sync,
            "intra_op_threads": self._fixed_threads,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a job that was deterministic goes on as it was. Nothing is changed, and nothing sent.

        Args:
            state: of `state_dict`, by any number of ranks; equal on all of them.
        Raises:
            ValueError: this job would go on with other bits.
        """
        own = self.state_dict()
        if state["deterministic"] and dict(state) != own:
            raise ValueError(
                f"the saved job was deterministic, with {dict(state)}; this one is {own}, and would go on with other "
                "bits. Start it with as many replicas in all (ranks times devices=), deterministic=True, and "
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
            self.communicator.seconds_waited(last), label="seconds_waited"
        )

    # Running

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `fn` on each replica of this rank and regroup the results. Communicates nothing."""
        if self.replicas.count == 1:
            with entered(self.strategy, self._contexts[0]):
                if args:
                    args = select_replica(0, tuple(args))
                if kwargs:
                    return fn(*args, **select_replica(0, dict(kwargs)))
                return fn(*args)
        outer = per_thread.modes

        def body(index: int) -> Any:
            own, per_thread.modes = per_thread.modes, list(outer)
            try:
                with entered(self.strategy, self._contexts[index]):
                    return fn(
                        *select_replica(index, tuple(args)),
                        **select_replica(index, dict(kwargs or {})),
                    )
            finally:
                per_thread.modes = own

        return regroup(self.replicas.run(body))

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The work of `ReplicaContext.merge_call`."""
        index = context.local_index
        if self.replicas.count == 1:
            with entered(self.strategy, None):
                return select_replica(0, merge_fn(self.strategy, *args, **kwargs))

        def merge(operands: list[tuple[Any, ...]]) -> Any:
            grouped, keywords = regroup(operands, wrap_numbers=False)
            with entered(self.strategy, None):
                return merge_fn(self.strategy, *grouped, **keywords)

        return select_replica(index, self.replicas.meet(index, merge, (args, kwargs)))

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

    # Combining

    def all_reduce(
        self,
        context: ReplicaContext,
        op: ReduceOp,
        leaves: Sequence[Any],
        options: CommunicationOptions | None,
        label: str,
    ) -> list[Any]:
        """The work of `ReplicaContext.all_reduce` on the leaves of a structure that `label` describes."""
        if self.num_replicas_in_sync == 1:
            return list(leaves)
        if self.num_local_replicas == 1 and not self.cross_replica_ops.has_custom_ops:
            values = list(zip(leaves))
            return self.cross_replica_ops.over_ranks.all_reduce(op, values, options, label)

        def merge(strategy: Strategy, calls: Any) -> list[Any]:
            return self.cross_replica_ops.all_reduce(
                self.cross_replica_ops.components(calls), options
            )

        return context.merge_call(merge, (AllReduceCall(op, leaves, label),))

    def all_gather(
        self,
        context: ReplicaContext,
        value: Any,
        axis: int,
        options: CommunicationOptions | None,
        label: str = "",
    ) -> Any:
        """The work of `ReplicaContext.all_gather` on one leaf of a structure that `label` describes."""
        if self.num_replicas_in_sync == 1:
            return value

        def merge(strategy: Strategy, value: Any) -> Any:
            return self.cross_replica_ops.all_gather(
                self.cross_replica_ops.components(value), axis, options, label
            )

        return context.merge_call(merge, (value,))

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
            op = self._parse_op(reduce_op)
        return self.cross_replica_ops.reduce_to(op, value, destinations, options)

    @staticmethod
    def _parse_op(reduce_op: Any) -> ReduceOp:
        if isinstance(reduce_op, VariableAggregation):
            raise AssertionError(f"reduce_op must be a ReduceOp, got {reduce_op}")
        return ReduceOp.parse(reduce_op)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce_to` for many (value, destinations) pairs in one collective; results in order."""
        require_cross_replica(self.strategy, "batch_reduce_to")
        with self.communicator.raising_together():
            op = self._parse_op(reduce_op)
            check_pairs(value_destination_pairs)
        pairs = self._batch_destinations(value_destination_pairs)
        return self.cross_replica_ops.batch_reduce(op, pairs, options)

    def _batch_destinations(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The all-reduce leaves its result on every device, whatever single device was asked for."""
        return [
            (v, v if isinstance(d, str) and isinstance(v, DistributedValues) else d)
            for v, d in pairs
        ]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies of `tensor` on `destinations`; numbers come back as they are. Context: cross-replica."""
        require_cross_replica(self.strategy, "broadcast_to")
        if destinations is None:
            raise AssertionError("broadcast_to needs destinations: a device or a distributed value")
        if isinstance(tensor, (int, float)):
            return tensor
        return self.cross_replica_ops.broadcast(tensor, destinations)
