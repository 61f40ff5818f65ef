"""The policy that reduces on one device, then copies the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.cross_device_ops import accumulation
from mpistrat.cross_device_ops.cross_device_ops import CrossDeviceOps, place
from mpistrat.machine.devices import check_device
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp
from mpistrat.values import PerReplica


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all components to one device, adds them there, and copies the result to its destinations.

    Args:
        reduce_to_device: name of the device; None: the device of the first component.
        accumulation_fn: a function of a list of arrays that returns their sum; None adds them in replica order. MEAN
            divides that sum by the number of components.

    Raises: TypeError if `accumulation_fn` is not callable.

    Example:
        >>> ops = ms.ReductionToOneDevice("cpu:0", accumulation_fn=lambda arrays: np.sum(arrays, axis=0))
        >>> ops.combine(ms.ReduceOp.MEAN, [np.array([1.0]), np.array([3.0])])
        array([2.])
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[Sequence[Array]], Array] | None = None,
    ) -> None:
        if accumulation_fn is None:
            accumulation_fn = accumulation.add_n
        if not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be a function, got {accumulation_fn!r:.60}")
        self.reduce_to_device = None if reduce_to_device is None else check_device(reduce_to_device)
        self.accumulation_fn = accumulation_fn

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        values = per_replica_value.values
        total = values[0] if len(values) == 1 else self.combine(reduce_op, values)
        return place(total, destinations)

    def combine(self, reduce_op: ReduceOp, values: Sequence[Any]) -> Any:
        """Return the sum, or for MEAN the mean, of two or more components of one value, on one device."""
        total = self.add(values)
        if reduce_op is ReduceOp.MEAN:
            return accumulation.divide(total, len(values))
        return total

    def add(self, values: Sequence[Any]) -> Any:
        """Return the sum of two or more components of one value, on one device, by `accumulation_fn`.

        IndexedSlices are concatenated instead.

        Raises: InvalidArgumentError if their shapes or dtypes differ, if they are booleans, or if only some are sparse.

        Example:
            >>> ms.ReductionToOneDevice().add([np.array([1.0]), np.array([3.0])])
            array([4.])
        """
        if accumulation.are_slices(values):
            return accumulation.add_slices(values)
        if self.reduce_to_device is not None:
            values = [arrays.to_device(value, self.reduce_to_device) for value in values]
        else:
            values = arrays.on_one_device(values)
        accumulation.check_summable(values)
        return self.accumulation_fn(values)
