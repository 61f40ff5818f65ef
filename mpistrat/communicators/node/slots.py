"""Slots: shared memory that moves a small call's values while the ranks agree that all make the same call.

A rank puts its buffer into its slot, then announces its call. When all ranks have announced theirs, every rank reads
the other ranks' slots. So a small call takes one meeting, and no message.

A rank has two slots, and calls take them in turn: a rank that enters call n + 2 has seen all ranks enter call n + 1, so
they have read the slots of call n. The agreement's fence orders these reads and writes on processors that reorder them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

# Bytes of the largest buffer that a slot holds.
LARGEST = 1 << 16
_SLOTS = 2
_LEAST_NUMBERS = 64  # as many dimensions as an array can have

_T = TypeVar("_T")
# Two lists, for calls with even and with odd numbers; each has an entry for each rank's slot, in rank order.
Places: TypeAlias = tuple[list[_T], list[_T]]


class Slot(Protocol):
    """This rank's memory for the values of a small call; `Contract.enter` fills it before the ranks agree on the call.

    Attributes:
        own: two objects, for calls with an even and with an odd number; `own[i][...] = payload` writes the values.
    """

    own: tuple[Any, Any]


class SharedSlots:
    """The slots of a communicator's ranks, two for each: memory for a few 64-bit numbers and the bytes of a buffer.

    Args:
        segments: the shared segment of each rank, in rank order; `nbytes_for` gives its size.
        rank: this rank's number.
    """

    def __init__(self, segments: list[np.ndarray], rank: int) -> None:
        self._segments = segments
        self.rank = rank
        self.size = len(segments)
        first = _bytes_of_numbers(self.size)
        self._bytes = self._places(lambda slot: slot[first:])
        self._numbers: dict[int, Places[memoryview]] = {}

    @staticmethod
    def nbytes_for(ranks: int) -> int:
        """Return the bytes of a rank's segment in a group of `ranks`."""
        return _SLOTS * (_bytes_of_numbers(ranks) + LARGEST)

    def bytes(self, nbytes: int) -> Places[np.ndarray]:
        """Return, for even and for odd calls, the memory of each rank's buffer of `nbytes` bytes, at most LARGEST."""
        even, odd = self._bytes
        return [place[:nbytes] for place in even], [place[:nbytes] for place in odd]

    def numbers(self, count: int) -> Places[memoryview]:
        """Return, for even and for odd calls, the memory of each rank's `count` 64-bit numbers.

        Args: count: at most 64, or 1 + the number of ranks if that is more.
        """
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
    """Return the bytes that the numbers take in a slot: a multiple of 64, the size of a cache line."""
    return -(-max(_LEAST_NUMBERS, ranks + 1) // 8) * 64
