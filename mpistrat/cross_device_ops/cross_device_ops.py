"""`CrossDeviceOps`, the base class of policies: its public methods check operands, and then call the hooks.

The hooks are the methods `…_implementation`; subclasses override them.
"""

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
from mpistrat.values import DistributedValues, Mirrored, PerReplica, first_component


def check_destinations(destinations: Any) -> None:
    """Check that `destinations` is a device's name, an array, a variable, IndexedSlices or a distributed value.

    Raises: ValueError for anything else, and for the name of a device that does not exist.
    """
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
    """Check the pairs. Raises: ValueError unless they are a list or tuple of (value, destinations) tuples."""
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
    """Copy `value` to the devices of `destinations`.

    Returns: for a device's name, the value there; for a distributed value of several components, a `Mirrored` with a
        copy for each component; otherwise `value` itself.
    """
    if isinstance(destinations, str) and arrays.is_array(value):
        return arrays.to_device(value, check_device(destinations))
    if not isinstance(destinations, DistributedValues) or len(destinations.values) == 1:
        return value
    if isinstance(value, IndexedSlices):
        rows = place(value.values, destinations)
        indices = place(value.indices, destinations)
        parts = zip(rows.values, indices.values, strict=True)
        return Mirrored([IndexedSlices(v, i, value.dense_shape) for v, i in parts])
    components: list[Any] = []
    for destination in destinations.values:
        there = value
        if arrays.is_torch(value):
            there = _moved_to(destination, value)
        if there is value and components:
            there = arrays.copy(there)
        components.append(there)
    return Mirrored(components)


def _moved_to(destination: Any, tensor: Any) -> Any:
    """Return `tensor` on the device of `destination`, one component of a distributed value.

    Returns: `tensor` itself if `destination` has no device, like a number, or an array of NumPy before version 2.
    """
    if isinstance(destination, IndexedSlices):
        destination = destination.values
    detached = arrays.detach_read(destination)
    return tensor.to(getattr(detached, "device", tensor.device))


def components_of(value: Any) -> tuple[Any, ...]:
    """Return the components of a distributed value, or any other value as the only component, without autograd."""
    components = value.values if isinstance(value, DistributedValues) else (value,)
    return tuple(
        c if isinstance(c, IndexedSlices) else arrays.as_operand(arrays.detach_read(c))
        for c in components
    )


class CrossDeviceOps:
    """A policy: how the components of a value, one for each replica of this rank, are reduced and gathered.

    For an algorithm of your own, subclass it and implement `reduce_implementation`; implement
    `batch_reduce_implementation`, too, to reduce several values together. A policy sees this rank's components only; a
    strategy that spans ranks combines the results over the ranks itself. `backward()` inside `run` passes the gradients
    of all used parameters to one `batch_reduce` with SUM; the parameter is the destination of its gradient.

    Attributes:
        between_ranks: how a strategy moves the results between ranks, unless its own options name an implementation.
        reduce_ops: the operations that `reduce` and `batch_reduce` take. A strategy calls the policy only for these,
            and computes other maxima, minima and products itself.

    Example:
        >>> class BackwardSum(ms.CrossDeviceOps):
        ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        ...         return sum(reversed(per_replica_value.values))
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=BackwardSum())
        >>> strategy.reduce("sum", ms.PerReplica([np.array([1.0]), np.array([2.0])]), axis=None)
        array([3.])

    Example:
        >>> ops, value = ms.ReductionToOneDevice(), ms.PerReplica([np.array([1.0]), np.array([3.0])])
        >>> ops.reduce(ms.ReduceOp.MEAN, value, "cpu:0"), ops.gather(value, "cpu:0", axis=0)
        (array([2.]), array([1., 3.]))
        >>> ops.batch_reduce(ms.ReduceOp.SUM, [(value, "cpu:0")])
        [array([4.])]
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
            reduce_op: one of `reduce_ops`, not a string.
            per_replica_value: components of the same shape and dtype; a plain array is one component.
            destinations: a distributed value or variable (the result goes to its devices), an array, or a device's
                name.

        Returns: a `Mirrored` if `destinations` has several components, else an array.

        Raises: ValueError for another `reduce_op` or for `destinations` that name no device.
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
        """Combine many values at once, each as `reduce` does.

        Args: value_destination_pairs: a list or tuple of (value, destinations) tuples.

        Returns: the results, in the order of the pairs; [] for no pairs.

        Raises: ValueError for another `reduce_op`, or for pairs of another form.
        """
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
        """Copy `tensor` to `destinations`. Returns: a `Mirrored` for several components, else an array.

        Example:
            >>> ms.ReductionToOneDevice().broadcast(np.ones(2), "cpu:0")
            array([1., 1.])
        """
        check_destinations(destinations)
        return self.broadcast_implementation(arrays.as_operand(tensor), destinations)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenate the components along `axis`, in replica order, and put the result on `destinations`.

        `IndexedSlices` become dense arrays first.

        Raises: ValueError for scalars, an axis out of range, or IndexedSlices without `dense_shape`.
            InvalidArgumentError if dtypes, or sizes along other axes, differ. NotImplementedError if
            `per_replica_value` is itself IndexedSlices, and not a `PerReplica` of them.
        """
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
        """Reduce one value, for `reduce`, with checked operands. Subclasses implement it.

        Raises: NotImplementedError here.

        Example:
            >>> class Logging(ms.ReductionToOneDevice):
            ...     def reduce_implementation(self, reduce_op, value, destinations, options):
            ...         print(reduce_op.name, len(value.values))
            ...         return super().reduce_implementation(reduce_op, value, destinations, options)
            >>> _ = Logging().reduce(ms.ReduceOp.SUM, np.ones(2), "cpu:0")
            SUM 1
        """
        raise NotImplementedError(f"{type(self).__name__} must implement reduce_implementation")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values, for `batch_reduce`, with checked operands; here each by `reduce_implementation`.

        Returns: the results, in the order of the pairs.

        Example:
            >>> class Logging(ms.ReductionToOneDevice):
            ...     def batch_reduce_implementation(self, reduce_op, pairs, options):
            ...         print(reduce_op.name, len(pairs))
            ...         return super().batch_reduce_implementation(reduce_op, pairs, options)
            >>> _ = Logging().batch_reduce(ms.ReduceOp.SUM, [(np.ones(2), "cpu:0")])
            SUM 1
        """
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
        """Return the context around the checks of operands. It does nothing here.

        `MpiAllReduce` returns a context that raises an error of this rank's operands on all ranks.
        """
        return contextlib.nullcontext()

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copy a checked tensor to `destinations`, for `broadcast`.

        Example:
            >>> class Logging(ms.ReductionToOneDevice):
            ...     def broadcast_implementation(self, tensor, destinations):
            ...         print("broadcast", tensor.shape)
            ...         return super().broadcast_implementation(tensor, destinations)
            >>> _ = Logging().broadcast(np.ones(2), "cpu:0")
            broadcast (2,)
        """
        return place(tensor, destinations)

    def gather_implementation(
        self,
        per_replica_value: PerReplica,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Any:
        """Concatenate the components of a checked, dense value, for `gather`.

        Example:
            >>> class Logging(ms.ReductionToOneDevice):
            ...     def gather_implementation(self, value, destinations, axis, options):
            ...         print("gather along axis", axis)
            ...         return super().gather_implementation(value, destinations, axis, options)
            >>> _ = Logging().gather(np.ones(2), "cpu:0", axis=0)
            gather along axis 0
        """
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
    """Sum values over this rank's replicas by `custom`, the user's policy. Not collective.

    Called by: `reduce` of strategies, and the reduction of gradients, before the ranks sum the results.

    Returns: for each (value, destinations) pair, one array: the first component if the policy returned a `Mirrored`.
    """
    local = custom.batch_reduce(ReduceOp.SUM, pairs, options)
    return [first_component(value) for value in local]
