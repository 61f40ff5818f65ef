"""`Reduce`: one rank, the root, gets the combined buffers of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mpistrat.arrays import Array, copy
from mpistrat.communicators.collectives.all_reduce import AllReduce, Reducing
from mpistrat.communicators.collectives.collective import Mover
from mpistrat.communicators.node.slots import SharedSlots
from mpistrat.communicators.node.small_calls import SmallReduction, largest_combined
from mpistrat.communicators.reduction import Reduction


@dataclass(slots=True)
class Reduce(Reducing):
    """Combine the `buffer` of all ranks into the root's: see `Communicator.reduce`.

    Attributes:
        buffer: this rank's input; on the root, also the result.
        reduction: how elements are combined. Transports use its operation alone: the communicator multiplies by
            the scale, and nothing is compressed.
        root: the rank that gets the result.
    """

    name: ClassVar[str] = "reduce"
    buffer: Array
    reduction: Reduction
    root: int = 0

    def key(self) -> tuple[Any, ...]:
        buffer = self.buffer
        return Reduce, self.reduction.agreed, buffer.dtype, buffer.shape, self.root

    def roles(self) -> tuple[Any, ...]:
        return self.reduction.op, self.root

    def small_form(self, slots: SharedSlots) -> SmallReduction | None:
        if self.buffer.nbytes > largest_combined(slots.size) or not self.can_slice():
            return None
        return SmallReduce(slots, self.how(), self.buffer)

    def by_others(self, mover: Mover) -> None:
        """Combine on all ranks by an all-reduce of a copy, and keep the result on the root."""
        total = copy(self.buffer)
        mover.move(AllReduce(total, self.reduction.plain))
        if mover.rank == self.root:
            self.buffer[...] = total


class SmallReduce(SmallReduction):
    def take(self, odd: int, collective: Reduce, payload: Any) -> None:
        if self.rank == collective.root:
            self.how.combine(self.pieces[odd], payload, None)
