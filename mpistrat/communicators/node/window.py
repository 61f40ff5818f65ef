"""The window: memory that all ranks of a node see, in which buffers are combined where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.blocks import PAGE, Blocks
from mpistrat.communicators.recycled_buffers import RecycledBuffers
from mpistrat.communicators.reduction.arithmetic import Arithmetic, share_of
from mpistrat.communicators.reduction.tree import how_to_combine
from mpistrat.communicators.transport import Exchange, Operands

# Bytes that are combined and handed out before the next, while they are in the caches.
_CHUNK = 1 << 18
# Buffers of a window: results of different backwards, and of different dtypes, may be in use at once.
_BUFFERS = 3
NOWHERE = -1


class Window(Exchange):
    """Hands out buffers, and combines them where they lie. Their places may differ from rank to rank.

    Args:
        segments: by rank, of `nbytes_for` the largest buffer.
        blocks: where the same ranks meet.

    Attributes:
        capacity: bytes of the largest buffer.
        buffers: the memory that callers get for their arrays.
    """

    def __init__(self, segments: list[np.ndarray], rank: int, blocks: Blocks) -> None:
        self._blocks = blocks
        self._places: list[int] = []
        capacity = (len(segments[rank]) - PAGE) // _BUFFERS
        self.capacity = capacity
        self._segments, self.rank, self._size = segments, rank, len(segments)
        self._others = [peer for peer in range(self._size) if peer != rank]
        self._address = segments[rank].ctypes.data
        # Of memoryviews: a slice of a slice of an array refers to the whole array only, not to the slice.
        memory = segments[rank].data
        starts = range(PAGE, PAGE + _BUFFERS * capacity, capacity)
        buffers = [np.frombuffer(memory[start : start + capacity], np.uint8) for start in starts]
        self.buffers = RecycledBuffers(buffers=buffers)

    @staticmethod
    def nbytes_for(largest: int) -> int:
        """The size of a segment for buffers of up to `largest` bytes."""
        return PAGE + _BUFFERS * -(-largest // PAGE) * PAGE

    def idle_bytes(self) -> int:
        """The bytes that this rank gives back with the window; 0 while anything refers to its buffers."""
        return len(self._segments[self.rank]) if self.buffers.are_idle() else 0

    def place_of(self, memory: np.ndarray) -> int:
        """Where `memory` begins in this rank's segment; NOWHERE for other memory."""
        place = int(memory.ctypes.data) - self._address
        return place if 0 < place < len(self._segments[self.rank]) else NOWHERE

    def find(self, buffer: Array, out: Array | None) -> bool:
        """Whether the `buffer` of each rank lies in its segment. Collective.

        The other methods combine and fill the buffers that were found last.
        """
        if buffer.nbytes > self.capacity:
            return False
        place = NOWHERE if out is not None else self.place_of(bytes_of(buffer))
        with self._blocks.unbroken:
            self._places = self._blocks.exchange(place)
        return NOWHERE not in self._places

    def all_reduce(self, operands: Operands) -> None:
        """Combine this rank's share of all buffers, into all of them."""
        how = how_to_combine(operands.buffer.dtype, operands.reduction.op, operands.tree)
        bounds = share_of(int(operands.buffer.nbytes), how.itemsize, self._size)[self.rank]
        with self._blocks.unbroken:
            for _, pieces in self._chunks(how, bounds):
                total = pieces[self.rank]
                how.combine(pieces, total, operands.reduction.scale)
                for peer in self._others:
                    pieces[peer][:] = total
            self._blocks.tick()  # nobody goes on while others read or write its memory

    def combine(self, how: Arithmetic, bounds: tuple[int, int], out: Any) -> None:
        """Combine what all buffers hold between `bounds`, in bytes, into `out`, elements as `how` has them."""
        for here, pieces in self._chunks(how, bounds):
            how.combine(pieces, out[..., here], None)

    def spread(self, how: Arithmetic, bounds: tuple[int, int], value: Any) -> None:
        """Put `value` into all buffers, between `bounds`."""
        for here, pieces in self._chunks(how, bounds):
            for piece in pieces:
                piece[:] = value[here]

    def _chunks(
        self, how: Arithmetic, bounds: tuple[int, int]
    ) -> Iterator[tuple[slice, list[Any]]]:
        """Slices of the elements between `bounds`, and the elements of each slice in all buffers, by rank."""
        first, end = bounds
        buffers = [
            how.view(segment[place + first : place + end])
            for segment, place in zip(self._segments, self._places, strict=True)
        ]
        chunk = _CHUNK // how.itemsize
        for start in range(0, len(buffers[0]), chunk):
            here = slice(start, start + chunk)
            yield here, [buffer[here] for buffer in buffers]
