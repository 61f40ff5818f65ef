"""Combining values over all replicas of all ranks: this rank's policy, then the communicator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.communicators import Communicator
from mpistrat.cross_device_ops import CrossDeviceOps, MpiAllReduce, accumulation, extrema
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
from mpistrat.values import DistributedValues, Mirrored, PerReplica
from mpistrat.variables.variable import SyncOnReadVariable, Variable


@dataclasses.dataclass(frozen=True, eq=False)
class AllReduceCall:
    """What one replica wants reduced: the leaves of a structure that `label` describes.

    An object of its own, so that regrouping the replicas' calls does not walk into the leaves.
    """

    op: ReduceOp
    leaves: Sequence[Any]
    label: str

    def __str__(self) -> str:
        return f"{self.op.name} of {self.label or '*'}"


class CrossReplicaOps:
    """What `Strategy` and `ReplicaContext` mean by reduce, gather and broadcast, without their guards.

    Every method that combines is called by every rank, in the same order. Operands are distributed
    values with a component per replica of this rank, or plain values.

    Args:
        communicator: the ranks.
        replicas_of_ranks: how many replicas each of them has, in rank order.
        cross_device_ops: the user's policy for the components on one rank, or None.
        options: defaults of every collective.
        deterministic: whether sums are not to depend on how replicas are spread over ranks.
        take_apart: gives the components of what has one name on several cores, and None for anything else; None where
            each replica has names of its own.

    Attributes:
        over_ranks: what combines the replicas of all ranks.
        custom: the policy that the user gave for the components on one rank; None where there is none.
    """

    def __init__(
        self,
        communicator: Communicator,
        replicas_of_ranks: tuple[int, ...],
        cross_device_ops: CrossDeviceOps | None,
        options: CommunicationOptions,
        deterministic: bool = False,
        take_apart: Callable[[Any], tuple[Any, ...] | None] | None = None,
    ) -> None:
        self.communicator = communicator
        self.num_local_replicas = replicas_of_ranks[communicator.rank]
        self.num_replicas = sum(replicas_of_ranks)
        self.custom = cross_device_ops
        self.options = options
        self._take_apart = take_apart
        self.over_ranks = (
            OrderedAllReduce(communicator, replicas_of_ranks, options)
            if deterministic
            else MpiAllReduce(communicator, options)
        )
        # A plain value counts once for its rank, however many replicas that has.
        self._of_plain = (
            OrderedAllReduce(communicator, (1,) * communicator.size, options)
            if deterministic and max(replicas_of_ranks) > 1
            else self.over_ranks
        )
        self._unequal = min(replicas_of_ranks) < max(replicas_of_ranks)
        self._rank_of_most = replicas_of_ranks.index(max(replicas_of_ranks))

    def components(self, value: Any) -> tuple[Any, ...]:
        """What each replica of this rank contributes; one object passed by all counts for each."""
        if self._take_apart is not None and (parts := self._take_apart(value)) is not None:
            return parts
        if not isinstance(value, DistributedValues):
            return (value,) * self.num_local_replicas
        components = value.values
        if isinstance(value, Variable) and len(components) == 1:  # kept in one place for all
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
        """Reduce what the replicas of this rank gave to one `ReplicaContext.all_reduce`."""
        if len({(call.op, call.label, len(call.leaves)) for call in calls}) > 1:
            by_replica = ", ".join(f"replica {i}: {call}" for i, call in enumerate(calls))
            text = f"the all_reduce calls of the replicas differ; got {by_replica}"
            self.communicator.raise_together(InvalidArgumentError(text))
        op, label = calls[0].op, calls[0].label
        values = list(zip(*(call.leaves for call in calls), strict=True))
        if self.custom is not None and op.adds_up:
            with self.communicator.raising_together():
                operands = [PerReplica(components_of(PerReplica(value))) for value in values]
            return self.batch_reduce(op, [(value, value) for value in operands], options)
        reduced = self.over_ranks.all_reduce(op, values, options, label)
        return [
            total if arrays.is_number(total) else place(total, PerReplica(value))
            for total, value in zip(reduced, values, strict=True)
        ]

    def reduce(
        self,
        op: ReduceOp,
        flat: list[Any],
        axis: int | Sequence[int] | None,
        label: str,
    ) -> list[Any]:
        """The work of `Strategy.reduce` on the leaves of a structure that `label` describes."""
        if axis is None:
            return self._reduce_elements(op, flat, label)
        return self._reduce_axis(op, flat, axis, f"{label} along axis {axis}".lstrip())

    def _reduce_elements(self, op: ReduceOp, flat: list[Any], label: str) -> list[Any]:
        results: list[Any] = [None] * len(flat)
        others: dict[int, Sequence[Any]] = {}
        for i, leaf in enumerate(flat):
            with self.communicator.raising_together():
                if self._is_local(leaf):
                    results[i] = arrays.detach_read(self._reduce_local(op, leaf))
                else:
                    others[i] = self._components_of_rank(leaf)
        for over_ranks, chosen in self._by_kind({i: flat[i] for i in others}):
            reduced = over_ranks.all_reduce(op, [others[i] for i in chosen], label=label)
            for i, result in zip(chosen, reduced, strict=True):
                results[i] = result
        return results

    def _reduce_axis(
        self, op: ReduceOp, flat: list[Any], axis: int | Sequence[int], label: str
    ) -> list[Any]:
        """On each replica, then over replicas; a mean sums the numbers of elements alongside."""
        if not op.adds_up:
            with self.communicator.raising_together():
                parts = [
                    [extrema.over_axes(op, c, axis) for c in self.components(leaf)] for leaf in flat
                ]
            return self.over_ranks.all_reduce(op, parts, label=label)
        with self.communicator.raising_together():
            dense = [list(map(accumulation.as_dense, self.components(leaf))) for leaf in flat]
            axes = [[arrays.check_axes(component, axis) for component in own] for own in dense]
            sums = [list(map(arrays.sum_over, *both)) for both in zip(dense, axes, strict=True)]
            counts = [list(map(arrays.count_over, *both)) for both in zip(dense, axes, strict=True)]
        if op is ReduceOp.SUM:
            return self.over_ranks.all_reduce(op, sums, label=label)
        label = f"mean {label}"
        reduced = self.over_ranks.all_reduce(ReduceOp.SUM, sums + counts, label=label)
        totals, elements = reduced[: len(sums)], reduced[len(sums) :]
        return [arrays.true_divide(t, int(n)) for t, n in zip(totals, elements, strict=True)]

    def _by_kind(self, values: Mapping[int, Any]) -> list[tuple[MpiAllReduce, list[int]]]:
        """Who adds up which of `values`: those with a component per replica, and the plain ones. Called by every rank.

        What `run` returned is plain on a rank with one replica; so where others have several, one of these tells.
        """
        if not values or self._of_plain is self.over_ranks:
            return [(self.over_ranks, list(values))] if values else []
        plain = [i for i, value in values.items() if not isinstance(value, DistributedValues)]
        if self._unequal:
            plain = self.communicator.broadcast_object(
                plain, root=self._rank_of_most, label="which values are plain"
            )
        kinds = (
            (self.over_ranks, [i for i in values if i not in plain]),
            (self._of_plain, [i for i in values if i in plain]),
        )
        return [(over_ranks, chosen) for over_ranks, chosen in kinds if chosen]

    def _components_of_rank(self, value: Any) -> tuple[Any, ...]:
        """Like `components`, but a plain value counts once for its rank."""
        return self.components(value) if isinstance(value, DistributedValues) else (value,)

    def _is_local(self, value: Any) -> bool:
        """Whether `value` is reduced without the other ranks. A plain value is one rank's, and counts once."""
        if self.num_replicas == 1:
            return True
        if isinstance(value, DistributedValues):
            copies = isinstance(value, Variable) and not isinstance(value, SyncOnReadVariable)
            return copies or isinstance(value, Mirrored)
        return self.communicator.size == 1

    def _reduce_local(self, op: ReduceOp, value: Any) -> Any:
        """Reduce what needs no communication: all replicas have the same value, or there is only one."""
        if self.num_replicas == 1:
            return value.values[0] if isinstance(value, DistributedValues) else value
        if op is not ReduceOp.SUM and op is not ReduceOp.PRODUCT:
            return value
        if isinstance(value, DistributedValues):
            raise AssertionError(
                f"{op.name} of a mirrored value would count it once per replica; got {value!r:.80}"
            )
        neutral = 0 if op is ReduceOp.SUM else 1
        number = arrays.is_number(value)
        if (number or arrays.is_array(value)) and not (arrays.as_array(value) != neutral).any():
            return value  # the same, however often it counts
        raise ValueError(
            f"{op.name} needs a value per replica, as run returns it: a plain value might be meant to count "
            f"once, or once per replica; got {value!r:.80}"
        )

    def reduce_to(
        self, op: ReduceOp, value: Any, destinations: Any, options: CommunicationOptions | None
    ) -> Any:
        if self.num_replicas == 1:
            return value.values[0] if isinstance(value, DistributedValues) else value
        with self.communicator.raising_together():
            check_destinations(destinations)
            if self._is_local(value):
                return place(self._reduce_local(op, value), destinations)
            components = self._components_of_rank(value)
        ((over_ranks, _),) = self._by_kind({0: value})
        (reduced,) = over_ranks.all_reduce(op, [components], options)
        if arrays.is_number(reduced):
            return reduced
        return place(reduced, destinations)

    def batch_reduce(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce with the user's `CrossDeviceOps`, if there is one, and over the ranks."""
        if self.num_replicas == 1:
            return [self.reduce_to(op, value, where, options) for value, where in pairs]
        if self.custom is None or not op.adds_up:
            return self._batch_reduce_over_ranks(op, pairs, options)
        if self.communicator.size == 1:
            return self.custom.batch_reduce(op, pairs, options)
        with self.communicator.raising_together():
            firsts = sums_of_rank(self.custom, pairs, options)
        totals = self.over_ranks.all_reduce(ReduceOp.SUM, [(value,) for value in firsts], options)
        if op is ReduceOp.MEAN:
            totals = [arrays.true_divide(t, self.num_replicas) for t in totals]
        return [place(total, where) for total, (_, where) in zip(totals, pairs, strict=True)]

    def _batch_reduce_over_ranks(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        results: list[Any] = [None] * len(pairs)
        for over_ranks, chosen in self._by_kind({i: value for i, (value, _) in enumerate(pairs)}):
            reduced = over_ranks.batch_reduce(op, [pairs[i] for i in chosen], options)
            for i, result in zip(chosen, reduced, strict=True):
                results[i] = result
        return results

    def gather(self, value: Any, axis: int, label: str = "") -> Any:
        """The work of `Strategy.gather` on one leaf of a structure that `label` describes."""
        plain = not isinstance(value, PerReplica)
        if self.num_replicas == 1 or (plain and self.communicator.size == 1):
            self._check_no_slices(value)
            own = value.values[0] if isinstance(value, DistributedValues) else value
            return accumulation.as_dense(own) if isinstance(own, IndexedSlices) else own
        return self._join(value, axis, None, label)

    def all_gather(
        self, components: Sequence[Any], axis: int, options: CommunicationOptions | None, label: str
    ) -> Any:
        """What the replicas of this rank gave to one `ReplicaContext.all_gather`, with all others'."""
        value = PerReplica(components)
        return place(self._join(value, axis, options, label), value)

    def _join(
        self, value: Any, axis: int, options: CommunicationOptions | None, label: str
    ) -> arrays.Array:
        if self.communicator.size == 1 and self.custom is not None:
            return self.custom.gather(value, self.components(value)[0], axis, options)
        with self.communicator.raising_together():
            self._check_no_slices(value)
            components = [accumulation.as_dense(c) for c in self._components_of_rank(value)]
            merged = self.over_ranks.merged(options)
        return self.over_ranks.all_gather(components, axis, label, merged)

    def _check_no_slices(self, value: Any) -> None:
        """Where a rank has one replica, they are what `run` returned."""
        if self.num_local_replicas > 1:
            accumulation.check_no_slices(value)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies of `tensor` on this rank's `destinations`. Communicates nothing."""
        return (self.custom or self.over_ranks).broadcast(tensor, destinations)

    def aggregate(self, aggregation: VariableAggregation, operand: Any, label: str) -> Any:
        """Combine what the replicas of all ranks give to a variable. Called by every rank.

        Args:
            label: which variable, and what for; equal on all ranks.
        """
        components = self.components(operand)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.from_first_replica(components[0], label)
        if self.num_replicas == 1:
            return components[0]
        if aggregation is VariableAggregation.SUM and arrays.is_number(components[0]):
            self.communicator.raise_together(
                ValueError(
                    f"{label}: aggregation SUM of {self.num_replicas} replicas needs arrays; whether the "
                    f"Python number {components[0]!r} counts once or once per replica is not clear"
                )
            )
        op = ReduceOp.from_variable_aggregation(aggregation)
        return self.over_ranks.all_reduce(op, [components], label=label)[0]

    def from_first_replica(self, value: Any, label: str) -> Any:
        """The first rank's `value`, an array, a number or `IndexedSlices`, on every rank."""
        if self.communicator.size == 1:
            return value
        label = f"{label}, of the first replica"
        if isinstance(value, IndexedSlices) or arrays.is_number(value):
            return self.communicator.broadcast_object(value, label=label)
        with self.communicator.raising_together():
            host = arrays.copy(arrays.to_host(arrays.as_array(arrays.detach_read(value))))
        self.communicator.broadcast(host, label=label)
        return arrays.to_device_of(host, value)
