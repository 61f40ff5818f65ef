"""The base class of all policies: checks in public methods, algorithms in `_implementation` hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.cross_device_ops import accumulation
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.machine.devices import check_device
from mpistrat.options import CommunicationImplementation, CommunicationOptions, check_options
from mpistrat.reduce_op import ReduceOp
from mpistrat.values import DistributedValues, Mirrored, PerReplica


def check_destinations(destinations: Any) -> None:
    """ValueError unless `destinations` names devices: a string, an array, a distributed value."""
    if isinstance(destinations, str):
        check_device(destinations)
    elif not (
        isinstance(destinations, (DistributedValues, IndexedSlices))
        or arrays.is_array(destinations)
        or hasattr(destinations, "assign")  # a variable
    ):
        raise ValueError(
            "destinations must be a distributed value, a variable, an array or the name of a device; got "
            f"{destinations!r:.60}"
        )


def check_pairs(value_destination_pairs: Any) -> None:
    """ValueError unless each is a tuple of a value and its destinations."""
    pairs = value_destination_pairs
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError(
            f"value_destination_pairs must be a list of (value, destinations) tuples; got {pairs!r:.80}"
        )
    for _, destinations in pairs:
        check_destinations(destinations)


def place(value: Any, destinations: Any) -> Any:
    """`value` where `destinations` says: itself for one device, a `Mirrored` of copies for several."""
    if isinstance(destinations, str) and arrays.is_array(value):
        return arrays.to_device(value, check_device(destinations))
    if not isinstance(destinations, DistributedValues) or len(destinations.values) == 1:
        return value
    if isinstance(value, IndexedSlices):
        rows, indices = place(value.values, destinations), place(value.indices, destinations)
        parts = zip(rows.values, indices.values, strict=True)
        return Mirrored([IndexedSlices(v, i, value.dense_shape) for v, i in parts])
    components: list[Any] = []
    for destination in destinations.values:
        there = _moved_to(destination, value) if arrays.is_torch(value) else value
        components.append(arrays.copy(there) if there is value and components else there)
    return Mirrored(components)


def _moved_to(destination: Any, tensor: Any) -> Any:
    """`tensor` where a component of destinations is. Numbers, and arrays of NumPy before version 2, move nothing."""
    if isinstance(destination, IndexedSlices):
        destination = destination.values
    return tensor.to(getattr(arrays.detach_read(destination), "device", tensor.device))


def components_of(value: Any) -> tuple[Any, ...]:
    """The arrays of a per-replica operand; a plain one is a single component."""
    components = value.values if isinstance(value, DistributedValues) else (value,)
    return tuple(
        c if isinstance(c, IndexedSlices) else arrays.as_operand(arrays.detach_read(c))
        for c in components
    )


class CrossDeviceOps:
    """How the components of values on this rank are reduced, broadcast and gathered.

    Subclass it and implement `reduce_implementation`, and `batch_reduce_implementation` where several
    values are not to be reduced one by one, to give a strategy an algorithm of your own. Operands hold
    the components of this rank's replicas; a strategy that spans ranks combines the results over the
    ranks itself. `backward()` inside `run` gives the gradients of all parameters that were used to one
    `batch_reduce` with SUM, each with its parameter.

    Attributes:
        between_ranks: how the results are combined over the ranks, where the strategy's options do not say.
        reduce_ops: what `reduce` and `batch_reduce` take. A strategy asks for these only, and makes maxima, minima and
            products itself.
    """

    between_ranks = CommunicationImplementation.AUTO
    reduce_ops: tuple[ReduceOp, ...] = (ReduceOp.SUM, ReduceOp.MEAN)

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine the components of one value and put the result on `destinations`.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, not a string.
            per_replica_value: components of the same shape and dtype; a plain array is one component.
            destinations: a distributed value or variable (its devices), an array, or a device's name.

        Returns:
            `Mirrored` where `destinations` has several components, else an array.
        """
        with self._checks():
            self._check_op(reduce_op)
            check_destinations(destinations)
            value = PerReplica(components_of(per_replica_value))
            options = check_options(options)
        return self.reduce_implementation(reduce_op, value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce` for many (value, destinations) pairs at once; results in the same order."""
        with self._checks():
            self._check_op(reduce_op)
            check_pairs(value_destination_pairs)
            checked = [
                (PerReplica(components_of(value)), where)
                for value, where in value_destination_pairs
            ]
            options = check_options(options)
        if not checked:
            return []
        return self.batch_reduce_implementation(reduce_op, checked, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies of `tensor` on `destinations`: `Mirrored` for several devices, else an array."""
        check_destinations(destinations)
        return self.broadcast_implementation(arrays.as_operand(tensor), destinations)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenate the components along `axis`, in replica order, on `destinations`; `IndexedSlices` dense."""
        with self._checks():
            check_destinations(destinations)
            accumulation.check_no_slices(per_replica_value)
            value = PerReplica([accumulation.as_dense(c) for c in components_of(per_replica_value)])
            options = check_options(options)
        return self.gather_implementation(value, destinations, axis, options)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Hook of `reduce`, with checked operands."""
        raise NotImplementedError(f"{type(self).__name__} must implement reduce_implementation")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Hook of `batch_reduce`, with checked operands."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def _check_op(self, reduce_op: Any) -> None:
        if reduce_op not in self.reduce_ops:
            expected = ", ".join(map(str, self.reduce_ops))
            raise ValueError(
                f"{type(self).__name__} takes as reduce_op one of {expected}; got {reduce_op!r:.60}"
            )

    def _checks(self) -> contextlib.AbstractContextManager[None]:
        """Around the checks of operands."""
        return contextlib.nullcontext()

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Hook of `broadcast`."""
        return place(tensor, destinations)

    def gather_implementation(
        self,
        per_replica_value: PerReplica,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Any:
        """Hook of `gather`."""
        values = per_replica_value.values
        if len(values) == 1:
            return values[0]
        axis = accumulation.check_joinable(values, axis)
        return place(arrays.concatenate(values, axis), destinations)


def sums_of_rank(
    custom: CrossDeviceOps,
    pairs: Sequence[tuple[Any, Any]],
    options: CommunicationOptions | None = None,
) -> list[Any]:
    """The sums over this rank's replicas of (value, destinations) pairs, by the user's policy. Not collective."""
    local = custom.batch_reduce(ReduceOp.SUM, pairs, options)
    return [v.values[0] if isinstance(v, DistributedValues) else v for v in local]
