"""Slots: shared memory in which the values of a small call travel together with the agreement on the call.

A rank puts its buffer into its slot, then announces its call. When all ranks have announced theirs, every rank reads
the other ranks' slots. So a small call takes one meeting, and no message.

A rank has two slots, and calls take them in turn: a rank that enters call n + 2 has seen all ranks enter call n + 1, so
they have read the slots of call n. The agreement's fence orders these reads and writes on processors that reorder them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

# Bytes of the largest buffer that a slot holds.
LARGEST = 1 << 16
_SLOTS = 2
_LEAST_NUMBERS = 64  # as many dimensions as an array can have

_T = TypeVar("_T")
# The places in the slots of all ranks, in rank order: for even calls, and for odd calls.
Places: TypeAlias = tuple[list[_T], list[_T]]


class Slot(Protocol):
    """The memory that takes a rank's values, so that they travel with the agreement on a call.

    Attributes:
        own: this rank's place for even calls, and its place for odd calls; `place[...] = payload` fills a place.
    """

    own: tuple[Any, Any]


class SharedSlots:
    """The slots of the ranks of a communicator. A slot holds a few 64-bit numbers, and the bytes of a buffer.

    Args:
        segments: the shared segment of each rank, in rank order; `nbytes_for` gives its size.
        rank: this rank's number.
    """

    def __init__(self, segments: list[np.ndarray], rank: int) -> None:
        self._segments, self.rank, self.size = segments, rank, len(segments)
        first = _bytes_of_numbers(self.size)
        self._bytes = self._places(operator.itemgetter(slice(first, None)))
        self._numbers: dict[int, Places[memoryview]] = {}

    @staticmethod
    def nbytes_for(ranks: int) -> int:
        """Return the bytes of a rank's segment in a group of `ranks`."""
        return _SLOTS * (_bytes_of_numbers(ranks) + LARGEST)

    def bytes(self, nbytes: int) -> Places[np.ndarray]:
        """Return the places of all ranks' buffers of `nbytes` bytes, at most LARGEST."""
        even, odd = ([place[:nbytes] for place in places] for places in self._bytes)
        return even, odd

    def numbers(self, count: int) -> Places[memoryview]:
        """Return the places of `count` 64-bit numbers of each rank; `count` is at most 64, or 1 + number of ranks."""
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
    """Return the bytes that the numbers take in a slot: whole cache lines."""
    return -(-max(_LEAST_NUMBERS, ranks + 1) // 8) * 64
