"""`AllReduce`: every rank gets the combined buffers of all ranks. `Reducing` is the base of all reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_floating
from mpistrat.communicators.collectives.collective import Collective, described
from mpistrat.communicators.node.slots import SharedSlots
from mpistrat.communicators.node.small_calls import SmallReduction, largest_combined
from mpistrat.communicators.reduction import BITWISE, OPS, SUM, Compressor, Reduction
from mpistrat.communicators.reduction.arithmetic import (
    Arithmetic,
    arithmetic_of,
    can_combine,
    scale,
)


class Reducing(Collective):
    """A collective that combines the buffers of all ranks element by element.

    Attributes:
        reduction: how elements are combined.
    """

    __slots__ = ()
    reduction: Reduction

    def check(self, size: int) -> None:
        """Check that the reduction can combine the buffer.

        Raises: ValueError if the operation is not in `OPS`, or if integers have a scale. TypeError for a bitwise
            operation on floats.
        """
        op = self.reduction.op
        if op not in OPS:
            raise ValueError(f"op must be one of {OPS}, got {op!r}")
        name = dtype_name(self.buffer)
        inexact = is_floating(self.buffer) or name.startswith("complex")
        if op in BITWISE and inexact:
            raise TypeError(f"{op!r} combines the bits of integers, got {name}")
        if self.reduction.scale is not None and not inexact:
            raise ValueError(f"scale is for floating point, got {name}")

    def roles(self) -> tuple[Any, ...]:
        return (self.reduction.op,)

    def labels(self) -> tuple[str, ...]:
        label, factor = self.reduction.agreed[1:]
        return (label,) if factor is None else (label, f"times {factor!r}")

    def can_slice(self) -> bool:
        return can_combine(self.buffer.dtype, self.reduction.op)

    def how(self) -> Arithmetic:
        """Return the object that combines the ranks' elements. Raises: TypeError unless `can_slice`."""
        return arithmetic_of(self.buffer.dtype, self.reduction.op)


@dataclass(slots=True)  # not frozen: that would make each call slower
class AllReduce(Reducing):
    """Combine the `buffer` of all ranks element by element: see `Communicator.all_reduce`.

    Attributes:
        buffer: this rank's input, and the result if `out` is None.
        reduction: how elements are combined.
        out: the array that gets the result; None: `buffer` gets it.
    """

    name: ClassVar[str] = "all_reduce"
    buffer: Array
    reduction: Reduction = SUM
    out: Array | None = None

    @property
    def target(self) -> Array:
        """The array that gets the result: `out`, or `buffer` without `out`."""
        return self.buffer if self.out is None else self.out

    @property
    def compressor(self) -> Compressor | None:
        return self.reduction.compressor

    def key(self) -> tuple[Any, ...]:
        buffer = self.buffer
        out = self.out
        of_out = None
        if out is not None:
            of_out = out.dtype, out.shape
        return AllReduce, self.reduction.agreed, buffer.dtype, buffer.shape, of_out

    def check(self, size: int) -> None:
        """Raises: ValueError also unless `out` has the shape and dtype of `buffer`."""
        buffer = self.buffer
        out = self.target
        # `super` does not know the class that `slots=True` has made anew
        Reducing.check(self, size)
        if (out.shape, out.dtype) != (buffer.shape, buffer.dtype):
            raise ValueError(
                f"out must be {described(buffer)}, like the buffer, got {described(out)}"
            )

    def small_form(self, slots: SharedSlots) -> SmallReduction | None:
        if self.buffer.nbytes > largest_combined(slots.size) or not self.can_slice():
            return None
        return SmallAllReduce(slots, self.how(), self.buffer)

    def alone(self) -> None:
        if self.out is not None:
            self.out[...] = self.buffer
        scale(self.target, self.reduction.scale)


class SmallAllReduce(SmallReduction):
    def payload(self, collective: AllReduce) -> Any:
        buffer = collective.buffer
        out = collective.out
        if out is not None and out.__class__ is not np.ndarray:
            collective.out = self.how.elements(out)
        return buffer if buffer.__class__ is np.ndarray else self.how.elements(buffer)

    def take(self, odd: int, collective: AllReduce, payload: Any) -> None:
        target = payload if collective.out is None else collective.out
        self.how.combine(self.pieces[odd], target, collective.reduction.scale)
