"""Combines values over all replicas of all ranks: first on this rank, then over the ranks by the communicator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.communicators import Communicator
from mpistrat.cross_device_ops import CrossDeviceOps, MpiAllReduce, accumulation, extrema
from mpistrat.cross_device_ops.accumulation import of_one_replica
from mpistrat.cross_device_ops.cross_device_ops import (
    check_destinations,
    components_of,
    place,
    sums_of_rank,
)
from mpistrat.cross_device_ops.ordered_all_reduce import OrderedAllReduce
from mpistrat.errors import InvalidArgumentError
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp, VariableAggregation
from mpistrat.replicas.group import ReplicaGroup
from mpistrat.values import DistributedValues, Mirrored, PerReplica, by_owner, first_component
from mpistrat.variables.variable import SyncOnReadVariable, Variable

# Reductions that change with the number of copies, and the value that they leave unchanged for any number of copies.
_NEUTRAL = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1}


class RankReducers:
    """The reducers of a group of replicas. Each combines the values of all ranks by collectives.

    Attributes:
        of_replicas: reduces values with a component per replica.
        of_plain: reduces plain values, one per rank. It is `of_replicas` itself, unless a deterministic group has
            several replicas on a rank, because then plain values are added up in another order.
    """

    def __init__(self, group: ReplicaGroup, options: CommunicationOptions) -> None:
        communicator = group.communicator
        counts = group.replicas_of_ranks
        self._communicator = communicator
        self._counts = counts
        if not group.deterministic:
            self.of_replicas = self.of_plain = MpiAllReduce(communicator, options)
            return
        self.of_replicas = self.of_plain = OrderedAllReduce(communicator, counts, options)
        if max(counts) > 1:
            self.of_plain = OrderedAllReduce(communicator, (1,) * communicator.size, options)

    def assigned(self, values: Mapping[int, Any]) -> list[tuple[MpiAllReduce, list[int]]]:
        """Return pairs of a reducer and the keys of the `values` that it is to reduce, distributed values first.

        Ranks must agree on the keys. On a rank with one replica, `run` returns plain values, too; so if ranks have
        different numbers of replicas, the first rank with the most replicas decides.

        Called by: every rank.
        """
        plain: list[int] = []
        if values and self.of_plain is not self.of_replicas:
            plain = [key for key in values if not isinstance(values[key], DistributedValues)]
            most = max(self._counts)
            if min(self._counts) < most:
                plain = self._communicator.broadcast_object(
                    plain, root=self._counts.index(most), label="which values are plain"
                )
        distributed = sorted(values.keys() - plain)
        pairs = [(self.of_replicas, distributed), (self.of_plain, plain)]
        return [(reducer, keys) for reducer, keys in pairs if keys]


def reduce_equal(op: ReduceOp, value: Any) -> Any:
    """Return `value`, if its reduction over several replicas gives `value` again for any number of replicas.

    Args: value: a value that is the same for all replicas: a mirrored value, or a plain value of the only rank.
    Raises:
        AssertionError: SUM or PRODUCT of a mirrored value.
        ValueError: SUM of a plain value that is not all 0, or PRODUCT of one that is not all 1.
    """
    if op not in _NEUTRAL:
        return of_one_replica(op, value)
    if isinstance(value, DistributedValues):
        raise AssertionError(
            f"{op.name} of a mirrored value would count it once per replica; got {value!r:.80}"
        )
    if arrays.is_number(value) or arrays.is_array(value):
        changes_with_copies = arrays.as_array(value) != _NEUTRAL[op]
        if not changes_with_copies.any():
            return value
    raise ValueError(
        f"{op.name} needs a value per replica, as run returns it: a plain value might be meant to count "
        f"once, or once per replica; got {value!r:.80}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class AllReduceCall:
    """One replica's call of `all_reduce`: the operation, and the leaves of a structure that `label` describes.

    This is a class, so that `regroup` puts the replicas' calls side by side without regrouping the leaves in them.
    """

    op: ReduceOp
    leaves: Sequence[Any]
    label: str

    def __str__(self) -> str:
        return f"{self.op.name} of {self.label or '*'}"


class CrossReplicaOps:
    """Reduces, gathers and broadcasts values for `Strategy` and `ReplicaContext`.

    `Strategy` and `ReplicaContext` check the caller's context (cross-replica or replica) before. Operands are plain
    values, or distributed values with a component for each replica of this rank. With one replica in all, `reduce_to`
    and `batch_reduce` return each value (the only component of a distributed value) and ignore its destinations.

    Called by: every rank, in the same order, for all methods that combine values.

    Args:
        group: the replicas.
        cross_device_ops: the program's policy for combining the components on one rank, or None.
        options: defaults of every collective.
        take_apart: a function of an operand, for TPU cores that run one program. It returns a tuple with each core's
            part of a tensor that all cores share as one object; else None. Other strategies give no function.

    Attributes:
        over_ranks: the reducer that combines values with a component per replica, over all replicas of all ranks.
        custom: the argument `cross_device_ops`.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        take_apart: Callable[[Any], tuple[Any, ...] | None] | None = None,
    ) -> None:
        self.communicator = group.communicator
        self.num_local_replicas = group.num_local_replicas
        self.num_replicas = group.num_replicas_in_sync
        self.custom = cross_device_ops
        self.options = options or CommunicationOptions()
        self._take_apart = take_apart
        self._reducers = RankReducers(group, self.options)
        self.over_ranks = self._reducers.of_replicas

    def components(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with the contribution of each replica of this rank to a reduction of `value`.

        A plain value, or a variable with one copy per rank, is the contribution of every replica.

        Raises: ValueError if a distributed value has another number of components than this rank has replicas.
        """
        if self._take_apart is not None:
            parts_of_cores = self._take_apart(value)
            if parts_of_cores is not None:
                return parts_of_cores
        if not isinstance(value, DistributedValues):
            return (value,) * self.num_local_replicas
        components = value.values
        if isinstance(value, Variable) and len(components) == 1:  # one copy for all replicas
            return components * self.num_local_replicas
        if len(components) != self.num_local_replicas:
            raise ValueError(
                f"this strategy has {self.num_local_replicas} replicas per rank, but got a "
                f"{type(value).__name__} of {len(components)} components; was it made by another strategy?"
            )
        return components

    def all_reduce(
        self, calls: Sequence[AllReduceCall], options: CommunicationOptions | None
    ) -> list[Any]:
        """Reduce the operands of one `ReplicaContext.all_reduce` over all replicas. Called by: every rank.

        Args: calls: the call of each replica of this rank.
        Returns: a result for each leaf, in the leaves' order; for arrays on several devices, a `Mirrored`.
        Raises: InvalidArgumentError, if the calls of this rank's replicas differ in operation or structure.
        """
        signatures = {(call.op, call.label, len(call.leaves)) for call in calls}
        if len(signatures) > 1:
            text = f"the all_reduce calls of the replicas differ; got {by_owner(calls, str)}"
            self.communicator.raise_together(InvalidArgumentError(text))
        op = calls[0].op
        label = calls[0].label
        leaves_of_replicas = [call.leaves for call in calls]
        values = list(zip(*leaves_of_replicas, strict=True))
        if self.custom is not None and op.adds_up:
            pairs = []
            with self.communicator.raising_together():
                for value in values:
                    operand = PerReplica(components_of(PerReplica(value)))
                    pairs.append((operand, operand))
            return self.batch_reduce(op, pairs, options)
        reduced = self.over_ranks.all_reduce(op, values, options, label)
        return [
            total if arrays.is_number(total) else place(total, PerReplica(value))
            for total, value in zip(reduced, values, strict=True)
        ]

    def reduce(
        self, op: ReduceOp, flat: list[Any], axis: int | Sequence[int] | None, label: str
    ) -> list[Any]:
        """Reduce each leaf in `flat` over all replicas, for `Strategy.reduce`. Called by: every rank.

        Args:
            axis: None to combine element by element, or the axes to reduce on each replica, too.
            label: describes the structure that the leaves are from.
        Returns: the results, in the leaves' order.
        """
        if axis is not None:
            return self._reduce_axis(op, flat, axis, f"{label} along axis {axis}".lstrip())
        if self.num_replicas == 1:
            return [arrays.detach_read(of_one_replica(op, first_component(leaf))) for leaf in flat]
        results: dict[int, Any] = {}
        components: dict[int, Sequence[Any]] = {}
        for i, leaf in enumerate(flat):
            with self.communicator.raising_together():
                if self._is_equal_everywhere(leaf):
                    results[i] = arrays.detach_read(reduce_equal(op, leaf))
                else:
                    components[i] = self._components_of_rank(leaf)
        unequal = {i: flat[i] for i in components}
        for reducer, chosen in self._reducers.assigned(unequal):
            operands = [components[i] for i in chosen]
            reduced = reducer.all_reduce(op, operands, label=label)
            results.update(zip(chosen, reduced, strict=True))
        return [results[i] for i in range(len(flat))]

    def _reduce_axis(
        self, op: ReduceOp, flat: list[Any], axis: int | Sequence[int], label: str
    ) -> list[Any]:
        """Reduce along `axis` on each replica, and then over replicas. Returns: a result for each leaf.

        A mean is the sum over all replicas, divided by the number of elements on all replicas.
        """
        with self.communicator.raising_together():
            values = [self.components(leaf) for leaf in flat]
            if op.adds_up:
                parts, counts = _sums_and_counts(values, axis)
            else:
                parts = [[extrema.over_axes(op, c, axis) for c in row] for row in values]
        label = accumulation.narrow_dtypes(values) + label
        if op is not ReduceOp.MEAN:
            totals = self.over_ranks.all_reduce(op, parts, label=label)
        else:
            reduced = self.over_ranks.all_reduce(
                ReduceOp.SUM, parts + counts, label=f"mean {label}"
            )
            pairs = zip(reduced[: len(flat)], reduced[len(flat) :], strict=True)
            totals = [arrays.true_divide(total, int(elements)) for total, elements in pairs]
        return accumulation.narrowed(self.communicator, totals, values)

    def _components_of_rank(self, value: Any) -> tuple[Any, ...]:
        """Return the value's components on this rank, as `components` does, but a plain value only once."""
        if isinstance(value, DistributedValues):
            return self.components(value)
        return (value,)

    def _is_equal_everywhere(self, value: Any) -> bool:
        """Whether `value` can be reduced without other ranks: a mirrored value, or a plain value of the only rank."""
        if isinstance(value, DistributedValues):
            has_copies = isinstance(value, (Mirrored, Variable))
            return has_copies and not isinstance(value, SyncOnReadVariable)
        return self.communicator.size == 1

    def reduce_to(
        self, op: ReduceOp, value: Any, destinations: Any, options: CommunicationOptions | None
    ) -> Any:
        if self.num_replicas == 1:
            return of_one_replica(op, first_component(value))
        with self.communicator.raising_together():
            check_destinations(destinations)
            if self._is_equal_everywhere(value):
                return place(reduce_equal(op, value), destinations)
            components = self._components_of_rank(value)
        reducer, _ = self._reducers.assigned({0: value})[0]  # one value has one reducer
        reduced = reducer.all_reduce(op, [components], options)[0]
        return reduced if arrays.is_number(reduced) else place(reduced, destinations)

    def batch_reduce(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce the values in `pairs`: on this rank by the program's policy, if there is one, and over the ranks.

        Args: pairs: (value, destinations).
        Returns: the results on their destinations, in the order of `pairs`.
        """
        if self.num_replicas == 1:
            return [self.reduce_to(op, value, where, options) for value, where in pairs]
        if self.custom is not None and op.adds_up:
            firsts = [[first_component(value)] for value, _ in pairs]
            if not accumulation.narrow_dtypes(firsts):
                return self._batch_reduce_by(self.custom, op, pairs, options)
        values = {i: value for i, (value, _) in enumerate(pairs)}
        results: dict[int, Any] = {}
        for reducer, chosen in self._reducers.assigned(values):
            reduced = reducer.batch_reduce(op, [pairs[i] for i in chosen], options)
            results.update(zip(chosen, reduced, strict=True))
        return [results[i] for i in values]

    def _batch_reduce_by(
        self,
        custom: CrossDeviceOps,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        """Combine the components on this rank by the program's policy, and the results over the ranks."""
        if self.communicator.size == 1:
            return custom.batch_reduce(op, pairs, options)
        with self.communicator.raising_together():
            firsts = sums_of_rank(custom, pairs, options)
        values = [(value,) for value in firsts]
        totals = self.over_ranks.all_reduce(ReduceOp.SUM, values, options)
        if op is ReduceOp.MEAN:
            totals = [arrays.true_divide(t, self.num_replicas) for t in totals]
        return [place(total, where) for total, (_, where) in zip(totals, pairs, strict=True)]

    def gather(self, value: Any, axis: int, label: str = "") -> Any:
        """Return `value` of all replicas, concatenated along `axis` in replica order, for `Strategy.gather`.

        With one replica, or a value that is equal on all replicas of the only rank, the value comes back alone, dense.

        Called by: every rank.
        Args: label: describes the structure that `value` is a leaf of.
        """
        may_differ = self.communicator.size > 1 or isinstance(value, PerReplica)
        if self.num_replicas > 1 and may_differ:
            return self._join(value, axis, None, label)
        if self.num_local_replicas > 1:
            accumulation.check_no_slices(value)
        only = first_component(value)
        if isinstance(only, IndexedSlices):
            only = accumulation.as_dense(only)
        return only

    def all_gather(
        self, components: Sequence[Any], axis: int, options: CommunicationOptions | None, label: str
    ) -> Any:
        """Concatenate the operands of one `ReplicaContext.all_gather` over all replicas. Called by: every rank.

        Args: components: the operands of this rank's replicas.
        Returns: the result on the devices of `components`: an array, or a `Mirrored` for several replicas.
        """
        value = PerReplica(components)
        return place(self._join(value, axis, options, label), value)

    def _join(
        self, value: Any, axis: int, options: CommunicationOptions | None, label: str
    ) -> arrays.Array:
        if self.communicator.size == 1 and self.custom is not None:
            return self.custom.gather(value, self.components(value)[0], axis, options)
        with self.communicator.raising_together():
            if self.num_local_replicas > 1:  # with one replica per rank, `run` may return slices
                accumulation.check_no_slices(value)
            components = [accumulation.as_dense(c) for c in self._components_of_rank(value)]
            merged = self.over_ranks.merged(options)
        return self.over_ranks.all_gather(components, axis, label, merged)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy `tensor` to this rank's `destinations`. Communicates nothing.

        Returns: an array; a `Mirrored` for several devices.
        """
        return (self.custom or self.over_ranks).broadcast(tensor, destinations)

    def aggregate(self, aggregation: VariableAggregation, operand: Any, label: str) -> Any:
        """Combine the replicas' operands for a variable by the variable's aggregation. Called by: every rank.

        Args:
            operand: a plain value, or a distributed value with a component per replica.
            label: names the variable and the purpose; equal on all ranks.
        Returns: the combined operand, equal on all ranks; for ONLY_FIRST_REPLICA, the first replica's operand.
        Raises: ValueError, on all ranks, for SUM of a Python number over several replicas.
        """
        components = self.components(operand)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return from_first_replica(self.communicator, components[0], label)
        if self.num_replicas == 1:
            return components[0]
        if aggregation is VariableAggregation.SUM and arrays.is_number(components[0]):
            self.communicator.raise_together(
                ValueError(
                    f"{label}: the Python number {components[0]!r} might be meant to count once, or for each replica "
                    f"in aggregation SUM of {self.num_replicas} replicas. Pass an array, which counts for each "
                    "replica; or make the call outside `run`, where it counts once"
                )
            )
        op = ReduceOp.from_variable_aggregation(aggregation)
        return self.over_ranks.all_reduce(op, [components], label=label)[0]


def from_first_replica(communicator: Communicator, value: Any, label: str) -> Any:
    """Return the first rank's `value` on every rank. Called by: every rank.

    Args: value: an array, a number or `IndexedSlices`. Only the first rank's counts.
    Returns: an array is on the device of this rank's own `value`.
    """
    if communicator.size == 1:
        return value
    label = f"{label}, of the first replica"
    if isinstance(value, IndexedSlices) or arrays.is_number(value):
        return communicator.broadcast_object(value, label=label)
    with communicator.raising_together():
        host = arrays.to_host(arrays.as_array(arrays.detach_read(value)))
        host = arrays.copy(host)  # the broadcast overwrites it
    communicator.broadcast(host, label=label)
    return arrays.to_device_of(host, value)


def _sums_and_counts(
    values: Sequence[Sequence[Any]], axis: int | Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Return two lists of lists: each component's sum along the axes, and the number of elements in each sum.

    Args: values: for each value, its components.
    """
    sums = []
    counts = []
    for components in values:
        sums_of_value = []
        counts_of_value = []
        for component in components:
            dense = accumulation.as_dense(component)
            axes = arrays.check_axes(dense, axis)
            sums_of_value.append(arrays.sum_over(dense, axes))
            counts_of_value.append(arrays.count_over(dense, axes))
        sums.append(sums_of_value)
        counts.append(counts_of_value)
    return sums, counts
