"""`ReduceScatter`: the combined buffers of all ranks are cut into equal parts, and each rank gets one part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mpistrat.arrays import Array, copy, dtype_name
from mpistrat.communicators.collectives.all_reduce import AllReduce, Reducing
from mpistrat.communicators.collectives.collective import Mover, described
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.node.small_calls import SmallReduction
from mpistrat.communicators.reduction import Reduction


@dataclass(slots=True)
class ReduceScatter(Reducing):
    """Combine the `buffer` of all ranks, and give each rank its part: see `Communicator.reduce_scatter`.

    Attributes:
        buffer: this rank's input.
        reduction: how elements are combined. Transports use its operation alone: the communicator multiplies by
            the scale, and nothing is compressed.
        out: gets this rank's part.
    """

    name: ClassVar[str] = "reduce_scatter"
    buffer: Array
    reduction: Reduction
    out: Array

    def key(self) -> tuple[Any, ...]:
        buffer = self.buffer
        out = self.out
        kind = buffer.dtype, buffer.shape, out.dtype, out.shape
        return ReduceScatter, self.reduction.agreed, kind

    def check(self, size: int) -> None:
        """Raises: ValueError also unless `buffer` has `size` times as many rows as `out`, and the same dtype."""
        buffer = self.buffer
        out = self.out
        # `super` does not know the class that `slots=True` has made anew
        Reducing.check(self, size)
        expected: tuple[int, ...] = (size,)
        if out.ndim:
            rows, *row_shape = out.shape
            expected = (size * rows, *row_shape)
        shape = tuple(buffer.shape)
        if (shape, dtype_name(buffer)) != (expected, dtype_name(out)):
            raise ValueError(
                f"reduce_scatter over {size} ranks into {described(out)} needs a buffer of {size} "
                f"times as many rows, got {described(buffer)}"
            )

    def small_form(self, slots: SharedSlots) -> SmallReduction | None:
        if self.buffer.nbytes > LARGEST or not self.can_slice():
            return None
        return SmallReduceScatter(slots, self)

    def alone(self) -> None:
        self.out[...] = self.buffer.reshape(self.out.shape)

    def by_others(self, mover: Mover) -> None:
        """Combine on all ranks by an all-reduce of a copy, and keep this rank's part."""
        total = copy(self.buffer)
        mover.move(AllReduce(total, self.reduction.plain))
        out = self.out
        length = out.shape[0] if out.ndim else 1
        first = mover.rank * length
        part = total[first : first + length]
        out[...] = part.reshape(out.shape)


class SmallReduceScatter(SmallReduction):
    def __init__(self, slots: SharedSlots, collective: ReduceScatter) -> None:
        super().__init__(slots, collective.how(), collective.buffer)
        shape = tuple(collective.out.shape)
        length = shape[0] if shape else 1
        rows = slice(slots.rank * length, (slots.rank + 1) * length)
        self._parts = [[piece[rows].reshape(shape) for piece in pieces] for pieces in self.pieces]

    def payload(self, collective: ReduceScatter) -> Any:
        collective.out = self.how.elements(collective.out)
        return super().payload(collective)

    def take(self, odd: int, collective: ReduceScatter, payload: Any) -> None:
        self.how.combine(self._parts[odd], collective.out, None)
