"""How the ranks of a node meet, and combine what lies in their shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.communicators.arithmetic import Arithmetic
from mpistrat.communicators.shared_memory import before_others_see
from mpistrat.communicators.station import Station
from mpistrat.communicators.waiting import wait_until
from mpistrat.recycled_buffers import RecycledBuffers

PAGE = 4096
# Of a rank's memory for what does not lie in the window: blocks in flight, the bytes of one, and what one rank combines
# of it. What is larger than the caches goes through main memory once more; what is smaller costs more meetings.
_SLOTS = 3
_BLOCK = 1 << 20
_WIDTH = 1 << 18
# Combined and handed out before the next, while it is in the caches.
_CHUNK = 1 << 18
# Results of different backwards, and of different dtypes, that may be in use at once.
_BUFFERS = 3

# Words of a segment's first page.
_TICK, _PLACE = 0, 8
NOWHERE = -1


class Scratch:
    """Where ranks meet, and hand each other blocks of what does not lie in the window.

    The block of tick t is written before it, combined after it, and read after tick t + 1: so its slot may be written
    again after tick t + 2, which needs three.
    """

    NBYTES = PAGE + _SLOTS * _BLOCK  # of a segment

    def __init__(self, segments: list[np.ndarray], rank: int, station: Station) -> None:
        self._rank, self._size, self._station = rank, len(segments), station
        words = [memoryview(segment[:PAGE].data).cast("q") for segment in segments]
        self._mine = words[rank]
        self._words = words
        self._peers = [word for peer, word in enumerate(words) if peer != rank]
        self._others = [peer for peer in range(self._size) if peer != rank]
        self._slots = [
            [segment[PAGE + i * _BLOCK : PAGE + (i + 1) * _BLOCK] for segment in segments]
            for i in range(_SLOTS)
        ]
        self._ticks = 0
        self._torn: BaseException | None = None

    def __enter__(self) -> None:
        """Around a whole collective: one that a rank leaves in its middle cannot be followed by another.

        Raises: RuntimeError after such a one.
        """
        if self._torn is not None:
            raise RuntimeError(
                "this rank cannot share memory with others any more: it left a collective in its middle, for "
                f"{type(self._torn).__name__}, and others may wait for its part. Save what you need and end the program"
            ) from self._torn

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._torn = error

    def tick(self) -> None:
        """Return once every rank has come here as often."""
        self._ticks = ticks = self._ticks + 1
        before_others_see()
        self._mine[_TICK] = ticks
        for words in self._peers:
            if words[_TICK] < ticks:
                wait_until(lambda words=words: words[_TICK] >= ticks, self._station)  # type: ignore[misc]
        before_others_see()

    def tell(self, place: int) -> list[int]:
        """What every rank tells. Ranks meet in something else before they tell again."""
        self._mine[_PLACE] = place
        self.tick()
        return [words[_PLACE] for words in self._words]

    def all_reduce(
        self, how: Arithmetic, source: np.ndarray, target: np.ndarray | None, scale: float | None
    ) -> None:
        """Combine all ranks' `source` in `target`, which may be `source`; None where nothing is wanted."""
        width = _width(self._size)

        def bring(first: int, slot: list[np.ndarray]) -> None:
            for peer in self._others:
                _copy(source, first + peer * width, slot[self._rank], peer * width, width)

        def combine(first: int, slot: list[np.ndarray]) -> None:
            start = first + self._rank * width
            length = max(0, min(width, len(source) - start))
            if not length:
                return
            here = slice(self._rank * width, self._rank * width + length)
            pieces = [how.view(memory[here]) for memory in slot]
            pieces[self._rank] = how.view(source[start : start + length])
            result = slot[self._rank][here]
            how.combine(pieces, how.view(result), scale)
            if target is not None:
                target[start : start + length] = result

        def take(first: int, slot: list[np.ndarray]) -> None:
            if target is not None:
                for peer in self._others:
                    _copy(slot[peer], peer * width, target, first + peer * width, width)

        self._flow(len(source), width * self._size, bring, combine, take)

    def reduce_scatter(
        self, how: Arithmetic, source: np.ndarray, bounds: Sequence[tuple[int, int]], out: Any
    ) -> None:
        """`out`, elements as `how` has them, gets what all ranks have between this rank's `bounds`, in bytes."""
        width = _width(self._size)
        mine, end = bounds[self._rank]

        def bring(first: int, slot: list[np.ndarray]) -> None:
            for peer in self._others:
                start, stop = bounds[peer]
                length = min(width, stop - start - first)
                _copy(source, start + first, slot[self._rank], peer * width, length)

        def combine(first: int, slot: list[np.ndarray]) -> None:
            length = min(width, end - mine - first)
            if length <= 0:
                return
            here = slice(self._rank * width, self._rank * width + length)
            pieces = [how.view(memory[here]) for memory in slot]
            start = mine + first
            pieces[self._rank] = how.view(source[start : start + length])
            begin = first // how.itemsize
            how.combine(pieces, out[..., begin : begin + length // how.itemsize], None)

        longest = max(stop - start for start, stop in bounds)
        self._flow(longest, width, bring, combine, None)

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        def bring(first: int, slot: list[np.ndarray]) -> None:
            if self._rank == root:
                _copy(buffer, first, slot[root], 0, _BLOCK)

        def take(first: int, slot: list[np.ndarray]) -> None:
            if self._rank != root:
                _copy(slot[root], 0, buffer, first, min(_BLOCK, len(buffer) - first))

        self._flow(len(buffer), _BLOCK, bring, None, take)

    def all_gather(self, mine: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Every rank's `mine`, in `parts` by rank. This rank's part may be where `mine` lies already."""
        if mine.ctypes.data != parts[self._rank].ctypes.data:
            parts[self._rank][:] = mine

        def bring(first: int, slot: list[np.ndarray]) -> None:
            _copy(mine, first, slot[self._rank], 0, _BLOCK)

        def take(first: int, slot: list[np.ndarray]) -> None:
            for peer in self._others:
                _copy(slot[peer], 0, parts[peer], first, min(_BLOCK, len(parts[peer]) - first))

        self._flow(max(map(len, parts)), _BLOCK, bring, None, take)

    def _flow(
        self,
        length: int,
        step: int,
        bring: Callable[[int, list[np.ndarray]], None],
        combine: Callable[[int, list[np.ndarray]], None] | None,
        take: Callable[[int, list[np.ndarray]], None] | None,
    ) -> None:
        """Block after block of `step` bytes: when one has been brought, the one before is combined, then taken."""
        delay = 0 if combine is None else 1
        blocks = -(-length // step)
        for i in range(blocks + delay):
            if i < blocks:
                bring(i * step, self._slots[self._ticks % _SLOTS])
            if combine is not None and i > 0:
                combine((i - 1) * step, self._slots[(self._ticks - 1) % _SLOTS])
            self.tick()
            if take is not None and i >= delay:
                take((i - delay) * step, self._slots[(self._ticks - 1 - delay) % _SLOTS])


class Window:
    """Buffers that are combined where they lie. Each rank hands out its own; the places need not be the same.

    Args:
        segments: of `nbytes_for` the largest buffer.

    Attributes:
        capacity: bytes of the largest buffer.
    """

    def __init__(self, segments: list[np.ndarray], rank: int) -> None:
        capacity = (len(segments[rank]) - PAGE) // _BUFFERS
        self.capacity = capacity
        self._segments, self._rank, self._size = segments, rank, len(segments)
        self._others = [peer for peer in range(self._size) if peer != rank]
        self._address = segments[rank].ctypes.data
        # Of memoryviews: a slice of a slice of an array refers to the whole array only, not to the slice.
        mine = segments[rank].data
        self._buffers = RecycledBuffers.of(
            [
                np.frombuffer(mine[PAGE + i * capacity : PAGE + (i + 1) * capacity], np.uint8)
                for i in range(_BUFFERS)
            ]
        )

    @staticmethod
    def nbytes_for(largest: int) -> int:
        """Of a segment for buffers of up to `largest` bytes."""
        return PAGE + _BUFFERS * -(-largest // PAGE) * PAGE

    def take(self, nbytes: int) -> np.ndarray | None:
        """A buffer that nothing refers to; None when all are in use."""
        return self._buffers.free(nbytes)

    def idle_bytes(self) -> int:
        """Of this rank's segment, which it gives back with the window; 0 while anything refers to its buffers."""
        return len(self._segments[self._rank]) if self._buffers.are_idle() else 0

    def place_of(self, memory: np.ndarray) -> int:
        """Where `memory` begins in this rank's segment; NOWHERE for other memory."""
        place = int(memory.ctypes.data) - self._address
        return place if 0 < place < len(self._segments[self._rank]) else NOWHERE

    def all_reduce(
        self, how: Arithmetic, places: Sequence[int], nbytes: int, scale: float | None
    ) -> None:
        """Combine this rank's share of all buffers, into all of them. Ranks meet before and after."""
        first, end = share_of(nbytes, how.itemsize, self._size)[self._rank]
        for pieces in self._chunks(how, places, first, end):
            mine = pieces[self._rank]
            how.combine(pieces, mine, scale)
            for peer in self._others:
                pieces[peer][:] = mine

    def combine(
        self, how: Arithmetic, places: Sequence[int], bounds: tuple[int, int], out: Any
    ) -> None:
        """`out`, elements as `how` has them, gets what all buffers hold between `bounds`, in bytes."""
        begin = 0
        for pieces in self._chunks(how, places, *bounds):
            end = begin + len(pieces[0])
            how.combine(pieces, out[..., begin:end], None)
            begin = end

    def spread(
        self, how: Arithmetic, places: Sequence[int], bounds: tuple[int, int], value: Any
    ) -> None:
        """Put `value` into all buffers, between `bounds`."""
        begin = 0
        for pieces in self._chunks(how, places, *bounds):
            end = begin + len(pieces[0])
            for piece in pieces:
                piece[:] = value[begin:end]
            begin = end

    def _chunks(
        self, how: Arithmetic, places: Sequence[int], first: int, end: int
    ) -> Iterator[list[Any]]:
        buffers = [
            how.view(segment[place + first : place + end])
            for segment, place in zip(self._segments, places, strict=True)
        ]
        chunk = _CHUNK // how.itemsize
        for start in range(0, (end - first) // how.itemsize, chunk):
            yield [buffer[start : start + chunk] for buffer in buffers]


def share_of(
    nbytes: int, itemsize: int, ranks: int, of: int | None = None
) -> list[tuple[int, int]]:
    """The bytes that each of `ranks` combines: whole elements, as equally as they can be. Only the first `of` do."""
    of = of or ranks
    elements = nbytes // itemsize
    cuts = [elements * min(i, of) // of * itemsize for i in range(ranks + 1)]
    return list(itertools.pairwise(cuts))


def _width(size: int) -> int:
    """Bytes of a block that each of `size` ranks combines: whole cache lines, which hold whole elements."""
    return max(64, min(_WIDTH, _BLOCK // size // 64 * 64))


def _copy(source: np.ndarray, start: int, target: np.ndarray, place: int, length: int) -> None:
    """As many of `length` bytes as there are in both."""
    length = min(length, len(source) - start, len(target) - place)
    if length > 0:
        target[place : place + length] = source[start : start + length]
