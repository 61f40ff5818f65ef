"""The window: memory that all ranks of a node share, where buffers are combined without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.blocks import PAGE, Blocks
from mpistrat.communicators.recycled_buffers import RecycledBuffers
from mpistrat.communicators.reduction.arithmetic import Arithmetic, share_of

# Bytes that are combined and copied to all buffers before the next bytes, while they are in the caches.
_CHUNK = 1 << 18
# Buffers of a window: the results of different backwards, and of different dtypes, may be in use at once.
_BUFFERS = 3
NOWHERE = -1


class Window:
    """Memory that a node's ranks share: it hands out buffers to arrays, and combines such buffers in place.

    Each rank has three buffers in its segment. Ranks may use different ones for the same call.

    Args:
        segments: the shared segment of each rank, in rank order; `nbytes_for` gives its size.
        rank: this rank's number.
        blocks: lets the ranks of the window wait for each other (`tick`).

    Attributes:
        capacity: bytes of each of the three buffers.
        buffers: hands out the buffers, and takes one again when nothing refers to it.
    """

    def __init__(self, segments: list[np.ndarray], rank: int, blocks: Blocks) -> None:
        self._blocks = blocks
        self._places: list[int] = []
        capacity = (len(segments[rank]) - PAGE) // _BUFFERS
        self.capacity = capacity
        self._segments = segments
        self.rank = rank
        self._size = len(segments)
        self._others = sorted({*range(self._size)} - {rank})
        self._address = segments[rank].ctypes.data
        # Slices of memoryviews, since a slice of an array's slice refers to the whole array and not to the first slice.
        memory = segments[rank].data
        buffers = []
        for start in range(PAGE, PAGE + _BUFFERS * capacity, capacity):
            part = memory[start : start + capacity]
            buffers.append(np.frombuffer(part, np.uint8))
        self.buffers = RecycledBuffers(buffers=buffers)

    @staticmethod
    def nbytes_for(largest: int) -> int:
        """Return the bytes of a segment for buffers of up to `largest` bytes."""
        return PAGE + _BUFFERS * -(-largest // PAGE) * PAGE

    def idle_bytes(self) -> int:
        """Return the bytes that this rank frees by dropping the window; 0 while anything refers to its buffers."""
        if not self.buffers.are_idle():
            return 0
        return len(self._segments[self.rank])

    def place_of(self, memory: np.ndarray) -> int:
        """Return the byte at which `memory` begins in this rank's segment; NOWHERE for other memory."""
        place = int(memory.ctypes.data) - self._address
        return place if 0 < place < len(self._segments[self.rank]) else NOWHERE

    def find(self, buffer: Array, out: Array | None) -> bool:
        """Whether every rank's `buffer` lies in the window, so that it can be combined there. Collective.

        The other methods then work on the buffers of this call.

        Returns: False, on all ranks, if any rank's buffer lies elsewhere, if `out` is not None on any rank, or if
            `buffer` is larger than `capacity`.
        """
        if buffer.nbytes > self.capacity:
            return False
        place = NOWHERE if out is not None else self.place_of(bytes_of(buffer))
        with self._blocks.unbroken:
            self._places = self._blocks.exchange(place)
        return NOWHERE not in self._places

    def all_reduce(self, how: Arithmetic, nbytes: int, scale: float | None) -> None:
        """Combine this rank's part of all ranks' buffers, and write the result into all these buffers. Collective.

        Args:
            how: combines elements of the dtype.
            nbytes: bytes of a buffer.
            scale: a factor of the result; None: the result as it is.
        """
        bounds = share_of(nbytes, how.itemsize, self._size)[self.rank]
        with self._blocks.unbroken:
            for _, pieces in self._chunks(how, bounds):
                total = pieces[self.rank]
                how.combine(pieces, total, scale)
                for peer in self._others:
                    pieces[peer][:] = total
            self._blocks.tick()  # no rank may go on while others read or write its memory

    def combine(self, how: Arithmetic, bounds: tuple[int, int], out: Any) -> None:
        """Combine the bytes from `bounds[0]` to before `bounds[1]` of all ranks' buffers into `out`. Not collective."""
        for here, pieces in self._chunks(how, bounds):
            how.combine(pieces, out[..., here], None)

    def spread(self, how: Arithmetic, bounds: tuple[int, int], value: Any) -> None:
        """Copy `value` into all ranks' buffers, from byte `bounds[0]` to before `bounds[1]`. Not collective."""
        for here, pieces in self._chunks(how, bounds):
            for piece in pieces:
                piece[:] = value[here]

    def _chunks(
        self, how: Arithmetic, bounds: tuple[int, int]
    ) -> Iterator[tuple[slice, list[Any]]]:
        """Yield the elements between `bounds` chunk by chunk, for loops that stay in the caches.

        Yields: the chunk as a slice, counted from `bounds[0]`, and a list with this chunk of each rank's buffer.
        """
        first, end = bounds
        buffers = [
            how.view(segment[place + first : place + end])
            for segment, place in zip(self._segments, self._places, strict=True)
        ]
        chunk = _CHUNK // how.itemsize
        for start in range(0, len(buffers[0]), chunk):
            here = slice(start, start + chunk)
            yield here, [buffer[here] for buffer in buffers]
