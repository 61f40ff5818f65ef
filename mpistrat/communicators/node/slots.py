"""Slots: memory that all ranks of a node see, in which small values travel with the agreement on a call.

Before a rank says which call it enters, it puts its buffer into its slot. When all ranks have said it, every rank reads
what it needs from the slots. So a small call takes one meeting, and no message.

A rank has two slots, which calls take in turn: a rank that enters call n + 2 has seen all ranks enter call n + 1, so
they have read the slots of call n. The agreement's fence orders these reads and writes on processors that reorder them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

# Bytes of the largest buffer.
LARGEST = 1 << 16
_SLOTS = 2
_LEAST_NUMBERS = 64  # as many dimensions as an array can have

_T = TypeVar("_T")
# Places in the slots of all ranks, by rank, for even and for odd calls.
Places: TypeAlias = tuple[list[_T], list[_T]]


class Slot(Protocol):
    """Where a rank puts what travels with the agreement on a call.

    Attributes:
        own: the place for even calls, and that for odd ones: `place[...] = payload` fills it.
    """

    own: tuple[Any, Any]


class SharedSlots:
    """The slots of the ranks of a communicator. A slot holds a few numbers, and the bytes of a buffer.

    Args:
        segments: shared memory, `nbytes_for` their number of each rank, in rank order.
    """

    def __init__(self, segments: list[np.ndarray], rank: int) -> None:
        self._segments, self.rank, self.size = segments, rank, len(segments)
        first = _bytes_of_numbers(self.size)
        self._bytes = self._places(operator.itemgetter(slice(first, None)))
        self._numbers: dict[int, Places[memoryview]] = {}

    @staticmethod
    def nbytes_for(ranks: int) -> int:
        """The size of a rank's segment."""
        return _SLOTS * (_bytes_of_numbers(ranks) + LARGEST)

    def bytes(self, nbytes: int) -> Places[np.ndarray]:
        """The places of buffers of `nbytes`, LARGEST at most."""
        even, odd = ([place[:nbytes] for place in places] for places in self._bytes)
        return even, odd

    def numbers(self, count: int) -> Places[memoryview]:
        """The places of `count` numbers of 64 bits: up to 64, and up to one more than there are ranks."""
        if count not in self._numbers:
            self._numbers[count] = self._places(lambda slot: slot[: 8 * count].data.cast("q"))
        return self._numbers[count]

    def _places(self, place_in: Callable[[np.ndarray], _T]) -> Places[_T]:
        length = _bytes_of_numbers(self.size) + LARGEST
        even, odd = (
            [place_in(segment[first : first + length]) for segment in self._segments]
            for first in (0, length)
        )
        return even, odd


def _bytes_of_numbers(ranks: int) -> int:
    """Of a slot: whole cache lines."""
    return -(-max(_LEAST_NUMBERS, ranks + 1) // 8) * 64
