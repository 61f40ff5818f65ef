"""Small sums of the ranks of a node: they travel with the agreement, in slots of memory that all ranks see.

Before a rank says which call it enters, it puts its buffer into its slot. When all ranks have said it, every rank
combines all slots, in rank order. So a small sum takes one meeting, and no message.

A rank has two slots, which calls take in turn: a rank that enters call n + 2 has seen all ranks enter call n + 1, so
they have read the slots of call n. The agreement's fence orders these reads and writes on processors that reorder them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.arithmetic import Arithmetic, arithmetic_of, can_combine
from mpistrat.communicators.reduction import Reduction

# Bytes of the largest buffer: of a larger one, each rank would read more than a message brings.
LARGEST = 1 << 12
_SLOTS = 2


class Slot(NamedTuple):
    """Where all ranks put buffers of one dtype and shape. The places are pairs, for even and odd calls.

    Attributes:
        how: combines the buffers.
        own: this rank's place.
        pieces: the places of all ranks, in rank order.
    """

    how: Arithmetic
    own: tuple[Any, Any]
    pieces: tuple[list[Any], list[Any]]


class SharedSlots:
    """The slots of the ranks of a communicator.

    Args:
        segments: shared memory, `NBYTES` of each rank, in rank order.
    """

    NBYTES = _SLOTS * LARGEST

    def __init__(self, segments: list[np.ndarray], rank: int) -> None:
        self._segments, self._rank = segments, rank

    def slot_for(self, buffer: Array, reduction: Reduction) -> Slot | None:
        """The slot of a sum; None if `buffer` is too large, or its dtype unknown. The same on all ranks."""
        nbytes, shape = int(buffer.nbytes), tuple(buffer.shape)
        if nbytes > LARGEST or not can_combine(buffer, reduction.op):
            return None
        how = arithmetic_of(buffer, reduction.op)

        def pieces(start: int) -> list[Any]:
            memories = [segment[start : start + nbytes] for segment in self._segments]
            return [how.view(memory).reshape(shape) for memory in memories]

        even, odd = pieces(0), pieces(LARGEST)
        return Slot(how, (even[self._rank], odd[self._rank]), (even, odd))
