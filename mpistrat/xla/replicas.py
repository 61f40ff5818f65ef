"""The replicas of a rank on XLA devices: one replica, or one on each of several cores that run the same program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import arrays, nest
from mpistrat.context import AnyStrategy, entered
from mpistrat.cross_device_ops import accumulation
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.replicas.replicas import Replicas
from mpistrat.values import DistributedValues, PassedWhole, PerReplica, select_replica
from mpistrat.xla.recorded_steps import RecordedSteps
from mpistrat.xla.replica_cores import ReplicaCores

if TYPE_CHECKING:
    import torch


class RecordedReplicas(Replicas):
    """The replica of a rank on an XLA device: a function of `run` is recorded, and XLA computes it afterwards.

    Args:
        steps: records the functions.
        why_through_the_host: the reason why sums over ranks go through host memory; "" if XLA sums over ranks, or if
            there is one rank.
    """

    records_steps = True

    def __init__(
        self,
        strategy: AnyStrategy,
        group: ReplicaGroup,
        ops: CrossReplicaOps,
        steps: RecordedSteps,
        why_through_the_host: str,
    ) -> None:
        super().__init__(strategy, group, ops)
        self.steps = steps
        self._why_through_the_host = why_through_the_host

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Call `fn` while its operations are recorded, and start the computation on the device.

        Called by: `Strategy.run`.
        Returns: the result of `fn`, without autograd history; the device may still be computing the result's tensors.
        Raises: RuntimeError if `fn` reads a value, computes with a tensor of the host, or uses torch.inference_mode().
        """
        keywords = kwargs or {}
        call_replicas = super().call

        def call() -> Any:
            # A result with autograd history would keep all intermediate values as results of the graph.
            return nest.map_structure(_cut_off, call_replicas(fn, args, kwargs))

        def brought() -> Any:
            return select_replica(0, (tuple(args), dict(keywords)))

        return self.steps.record(fn, args, keywords, call, brought)

    @property
    def device_random_state(self) -> int:
        return self.steps.random_state

    def set_device_random_state(self, state: int) -> None:
        self.steps.set_random_state(state)

    def explain(self) -> str:
        text = self.steps.compilations.explain()
        why = self._why_through_the_host
        if why:
            text = f"XLA devices: through host memory and MPI, for {why}\n{text}".rstrip()
        return text


class ReplicasOnCores(RecordedReplicas):
    """One replica on each of a rank's cores. A function of `run` is called once, and all cores run the recorded graph.

    Args: cores: records steps for all cores, and reads and sums the cores' values.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        group: ReplicaGroup,
        ops: CrossReplicaOps,
        cores: ReplicaCores,
        steps: RecordedSteps,
        why_through_the_host: str,
    ) -> None:
        as_one = dataclasses.replace(group, worker_devices=group.worker_devices[:1])
        super().__init__(strategy, as_one, ops, steps, why_through_the_host)
        first = group.first_replica_id
        self.set_contexts([_ContextOnCores(strategy, first, cores, self._spread)])
        self.group = group  # has an entry for each core; `as_one` has a single one
        self._core_values = cores.values
        self._num_local = group.num_local_replicas

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        keywords = kwargs or {}

        def call() -> Any:
            own_args = self._spread(tuple(args))
            own_keywords = self._spread(dict(keywords))
            with entered(self.strategy, self, self.contexts[0]):
                result = fn(*own_args, **own_keywords)
            return nest.map_structure(lambda leaf: self._of_all(arrays.detach(leaf)), result)

        return self.steps.record(fn, args, keywords, call, lambda: (args, keywords))

    def _of_all(self, leaf: Any) -> Any:
        """Return a `PerReplica` with each core's value of an XLA tensor or `IndexedSlices`, or a number for each core.

        Any other leaf comes back as it is.
        """
        if isinstance(leaf, IndexedSlices) or arrays.is_on_xla(leaf):
            return PerReplica(self.ops.components(leaf))
        if arrays.is_number(leaf):
            return PerReplica([leaf] * self._num_local)
        return leaf

    def _spread(self, structure: Any) -> Any:
        """Return `structure` with a tensor in place of each distributed value; core i has replica i's component.

        If all components are one object that is no array of the host, the object itself takes the value's place.
        Variables, and leaves that are not distributed, come back as they are.
        """
        return nest.map_structure(self._spread_leaf, structure)

    def _spread_leaf(self, value: Any) -> Any:
        if not isinstance(value, DistributedValues) or isinstance(value, PassedWhole):
            return value
        components = self.ops.components(value)
        first = components[0]
        on_host = arrays.is_array(first) and not arrays.is_on_xla(first)
        is_one_object = all(component is first for component in components)
        if is_one_object and not on_host:
            return first
        return self._core_values.scatter([_as_host_tensor(component) for component in components])

    def all_reduce(
        self,
        context: ReplicaContext,
        op: ReduceOp,
        leaves: Sequence[Any],
        options: CommunicationOptions | None,
        label: str,
    ) -> list[Any]:
        if not op.adds_up:
            parts = [self.ops.components(leaf) for leaf in leaves]
            return self.ops.over_ranks.all_reduce(op, parts, options, label)
        sums = [
            (self._core_values.sum(leaf),) if arrays.is_on_xla(leaf) else self.ops.components(leaf)
            for leaf in leaves
        ]
        name = f"{op.name} of {label or '*'}"
        reduced = self.ops.over_ranks.all_reduce(ReduceOp.SUM, sums, options, name)
        if op is ReduceOp.SUM:
            return reduced
        count = self.ops.num_replicas
        return [
            total / count if arrays.is_number(total) else accumulation.divide(total, count)
            for total in reduced
        ]

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call `merge_fn` once for all replicas of this rank, in the cross-replica context.

        Args: args, kwargs: arguments of `merge_fn`; each XLA tensor and number becomes a `PerReplica` of the cores'
            values.
        """
        args, kwargs = nest.map_structure(self._of_all, (args, kwargs))
        return super().merge_call(context, merge_fn, args, kwargs)

    def sum_of_rank(self, value: Any) -> Any:
        if not arrays.is_on_xla(value):
            return value
        if arrays.is_floating(value) and arrays.itemsize(value) < 4:
            value = value.float()
        return self._core_values.sum(value)


class _ContextOnCores(ReplicaContext):
    """The replica context of all replicas of a rank at once. Its replica id is a tensor that differs between cores.

    Args:
        first: the id of the rank's first replica.
        spread: takes a nest; puts each replica's component of a distributed value on the replica's core.
    """

    def __init__(
        self, strategy: AnyStrategy, first: int, cores: ReplicaCores, spread: Callable[[Any], Any]
    ) -> None:
        super().__init__(strategy, None)
        self._first = first
        self._cores = cores
        self._spread = spread

    def __str__(self) -> str:
        return f"the replicas from {self._first} on"

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, from 0 to num_replicas_in_sync - 1: an int64 tensor that differs between cores."""
        return self._cores.values.number() + self._first

    def own_component(self, value: DistributedValues) -> Any:
        return self._spread(value)


def _as_host_tensor(component: Any) -> torch.Tensor:
    if not arrays.is_array(component) and not arrays.is_number(component):
        raise ValueError(
            "the replicas of a rank run one program, so what they get must be arrays, numbers, or the same object, "
            f"got {component!r:.80}; start one rank per core for anything else"
        )
    return arrays.as_tensor(arrays.to_host(arrays.as_array(component)))


def _cut_off(leaf: Any) -> Any:
    """Return an XLA tensor without its autograd history. An autograd leaf, or any other object, comes back itself."""
    if arrays.is_on_xla(leaf) and not leaf.is_leaf:
        return leaf.detach()
    return leaf


def components_on(cores: ReplicaCores, value: Any) -> tuple[Any, ...] | None:
    """Return the value that each core has for a tensor or `IndexedSlices` that the program holds as one object.

    Called by: `CrossReplicaOps`, before it combines or gathers values.
    Returns: a tuple of a tensor, or `IndexedSlices`, per core of this rank. None if the caller has to find the
        components: `value` is no XLA tensor, has several components already, or is not distributed and no step is being
        recorded.
    """
    whole = value
    if isinstance(value, DistributedValues) and len(value.values) == 1:
        whole = arrays.detach_read(value.values[0])
    elif isinstance(value, DistributedValues) or not cores.inside:
        return None
    if isinstance(whole, IndexedSlices):
        values = cores.values.rows(whole.values)
        indices = cores.values.rows(whole.indices)
        of_cores = zip(values, indices, strict=True)
        return tuple(IndexedSlices(v, i, whole.dense_shape) for v, i in of_cores)
    if arrays.is_on_xla(whole):
        return tuple(cores.values.rows(whole))
    return None
