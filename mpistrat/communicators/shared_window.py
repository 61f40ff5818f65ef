"""Collectives of the ranks of one node through memory that they share.

A reduction is a reduce-scatter straight out of the peers' memory, then a copy of the rest: each rank combines one slice
of every rank's buffer. What lies in the window already is combined where it is, and nothing is copied in.
"""

from __future__ import annotations

import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays import Array, dtype_name
from mpistrat.communicators.arithmetic import Arithmetic, arithmetic_of
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.host_views import as_buffer_of, view_of
from mpistrat.communicators.shared_memory import share
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
# Below, MPI is not even compared with: two meetings in Python cost more than its whole message.
_SMALLEST = 1 << 15
_COMPARED = (1 << 20, 1 << 18, 1 << 16, 1 << 15)
_COMPARED_TIMES = 11
# Results of different backwards, and of different dtypes, that may be in use at once.
_BUFFERS = 3

# Words of a segment's first page.
_TICK, _PLACE = 0, 8
NOWHERE = -1


class SharedWindowCommunicator(Communicator):
    """Wraps the communicator of a node's ranks, which moves what is small, or not numbers.

    Args:
        inner: over ranks of one node.
        station: where ranks that wait are watched.

    Attributes:
        why_not: why there is no shared memory, where there is none: then `inner` does everything.
        smallest: bytes from which on a buffer outside the window is combined through it; measured at the first large
            one.
    """

    def __init__(self, inner: Communicator, station: Station) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._station = station
        self.why_not = ""
        self.smallest: float | None = None
        self._scratch: _Scratch | None = None
        self._window: _Window | None = None

    # Memory

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """`nbytes` of the window, uninitialized, to be combined where they are; None where there is no room.

        Collective, with equal `nbytes`; but each rank may or may not get one. The memory is used again once nothing
        refers to it.
        """
        if not nbytes or self._meeting() is None:
            return None
        if self._window is None or self._window.capacity < nbytes:
            segments, why = share(
                PAGE + _BUFFERS * _pages(nbytes),
                self.rank,
                self.inner.all_gather_object,
                populate=False,
            )
            if segments is None:
                self._do_without(why)
                return None
            self._window = _Window(segments, self.rank, _pages(nbytes))
        return self._window.take(nbytes)

    def _meeting(self) -> _Scratch | None:
        """The scratch memory, made when it is first needed. Collective."""
        if self._scratch is None and not self.why_not:
            nbytes = PAGE + _SLOTS * _BLOCK
            segments, why = share(nbytes, self.rank, self.inner.all_gather_object, populate=True)
            if segments is None:
                self._do_without(why)
            else:
                self._scratch = _Scratch(segments, self.rank, self._station)
                self.smallest = self._compare()
        return self._scratch

    def _do_without(self, why: str) -> None:
        self.why_not = why
        if self.rank == 0:
            warnings.warn(
                f"no shared memory on this node, so all messages go through MPI, which is slower: {why}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _compare(self) -> float:
        """From which size on the window is faster than MPI, for all ranks."""
        smallest = 2 * _COMPARED[0]
        for nbytes in _COMPARED:
            buffer = np.zeros(nbytes // 4, np.float32)
            self.smallest = 0
            seconds = np.array(
                [_median_seconds(who.all_reduce, buffer) for who in (self, self.inner)]
            )
            self.inner.all_reduce(seconds, "max")
            if seconds[0] > seconds[1]:
                break
            smallest = nbytes
        return smallest

    # Collectives

    def all_reduce(
        self,
        buffer: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        label: str = "",
        error: Exception | None = None,
        scale: float | None = None,
    ) -> None:
        target = buffer if out is None else out
        nbytes = _size_of(buffer)
        how = arithmetic_of(dtype_name(buffer), op) if nbytes >= _SMALLEST else None
        scratch = None if how is None else self._meeting()
        if how is None or scratch is None:
            self.inner.all_reduce(buffer, op, out=out, scale=scale)
            return
        source = _bytes(view_of(buffer))
        window = self._window
        if window is not None and nbytes <= window.capacity:
            place = window.place_of(source) if target is buffer else NOWHERE
            places = scratch.all_reduce(how, source, _bytes(view_of(target)), scale, place)
            if places is not None:
                window.all_reduce(how, places, nbytes, scale)
                scratch.tick()  # nobody goes on while others read or write its memory
        elif nbytes < (self.smallest or 0):
            self.inner.all_reduce(buffer, op, out=out, scale=scale)
        else:
            scratch.all_reduce(how, source, _bytes(view_of(target)), scale)

    def start_all_reduce(self, buffer: Array, op: str = "sum") -> Callable[[], bool]:
        return self.inner.start_all_reduce(buffer, op)

    def reduce_scatter(
        self, buffer: Array, out: Array, op: str = "sum", *, label: str = ""
    ) -> None:
        nbytes = _size_of(buffer)
        how = arithmetic_of(dtype_name(buffer), op) if nbytes >= _SMALLEST else None
        scratch = None if how is None else self._meeting()
        if how is None or scratch is None or nbytes < (self.smallest or 0):
            self.inner.reduce_scatter(buffer, out, op)
        else:
            scratch.reduce_scatter(how, _bytes(view_of(buffer)), _bytes(view_of(out)))

    def reduce(self, buffer: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        nbytes = _size_of(buffer)
        how = arithmetic_of(dtype_name(buffer), op) if nbytes >= _SMALLEST else None
        scratch = None if how is None else self._meeting()
        if how is None or scratch is None or nbytes < (self.smallest or 0):
            self.inner.reduce(buffer, root, op)
        else:
            source = _bytes(view_of(buffer))
            scratch.all_reduce(how, source, source if self.rank == root else None, None)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        nbytes = _size_of(buffer)
        scratch = self._meeting() if nbytes >= _SMALLEST else None
        if scratch is None or nbytes < (self.smallest or 0):
            self.inner.broadcast(buffer, root)
        else:
            scratch.broadcast(_bytes(view_of(buffer)), root)

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        shapes = self.inner.all_gather_object((tuple(buffer.shape), _size_of(buffer)))
        largest = max(nbytes for _, nbytes in shapes)
        scratch = self._meeting() if largest >= _SMALLEST else None
        if scratch is None or largest < (self.smallest or 0):
            return self.inner.all_gather(buffer)
        view = view_of(buffer)
        parts = [np.empty(shape, view.dtype) for shape, _ in shapes]
        scratch.all_gather(_bytes(view), [_bytes(part) for part in parts])
        return [as_buffer_of(buffer, part) for part in parts]

    def broadcast_object(self, value: Any, root: int = 0, *, label: str = "") -> Any:
        return self.inner.broadcast_object(value, root)

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        return self.inner.all_gather_object(value)

    def barrier(self, *, label: str = "") -> None:
        self.inner.barrier()

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.inner.split(color, key)

    def abort(self, code: int) -> NoReturn:
        self.inner.abort(code)


class _Scratch:
    """Where ranks meet, and hand each other blocks of what does not lie in the window.

    The block of tick t is written before it, combined after it, and read after tick t + 1: so its slot may be written
    again after tick t + 2, which needs three.
    """

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

    def tick(self) -> None:
        """Return once every rank has come here as often."""
        self._ticks = ticks = self._ticks + 1
        _before_others_see()
        self._mine[_TICK] = ticks
        for words in self._peers:
            if words[_TICK] < ticks:
                wait_until(lambda words=words: words[_TICK] >= ticks, self._station)  # type: ignore[misc]
        _before_others_see()

    def all_reduce(
        self,
        how: Arithmetic,
        source: np.ndarray,
        target: np.ndarray | None,
        scale: float | None,
        place: int | None = None,
    ) -> list[int] | None:
        """Combine all ranks' `source` in `target`, which may be `source`; None where nothing is wanted.

        Args:
            place: where in the window this rank's source lies, or NOWHERE; None when no rank's does.
        Returns: where each rank's source lies, if all lie in the window: then nothing has been done.
        """
        width = _width(self._size)

        def bring(first: int, slot: list[np.ndarray]) -> None:
            if place is not None and first == 0:
                self._mine[_PLACE] = place
                if place != NOWHERE:
                    return
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

        flow = self._flow(len(source), width * self._size, bring, combine, take)
        if place is not None:
            next(flow)
            places = [words[_PLACE] for words in self._words]
            if NOWHERE not in places:
                return places
            if places.count(NOWHERE) < self._size:  # some have brought nothing
                return self.all_reduce(how, source, target, scale)
        _exhaust(flow)
        return None

    def reduce_scatter(self, how: Arithmetic, source: np.ndarray, out: np.ndarray) -> None:
        """Rank r's `out` is the r-th of equal parts of `source`."""
        width = _width(self._size)

        def bring(first: int, slot: list[np.ndarray]) -> None:
            for peer in self._others:
                length = min(width, len(out) - first)
                _copy(source, peer * len(out) + first, slot[self._rank], peer * width, length)

        def combine(first: int, slot: list[np.ndarray]) -> None:
            length = min(width, len(out) - first)
            here = slice(self._rank * width, self._rank * width + length)
            pieces = [how.view(memory[here]) for memory in slot]
            start = self._rank * len(out) + first
            pieces[self._rank] = how.view(source[start : start + length])
            how.combine(pieces, how.view(out[first : first + length]), None)

        _exhaust(self._flow(len(out), width, bring, combine, None))

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        def bring(first: int, slot: list[np.ndarray]) -> None:
            if self._rank == root:
                _copy(buffer, first, slot[root], 0, _BLOCK)

        def take(first: int, slot: list[np.ndarray]) -> None:
            if self._rank != root:
                _copy(slot[root], 0, buffer, first, min(_BLOCK, len(buffer) - first))

        _exhaust(self._flow(len(buffer), _BLOCK, bring, None, take))

    def all_gather(self, mine: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        parts[self._rank][:] = mine

        def bring(first: int, slot: list[np.ndarray]) -> None:
            _copy(mine, first, slot[self._rank], 0, _BLOCK)

        def take(first: int, slot: list[np.ndarray]) -> None:
            for peer in self._others:
                _copy(slot[peer], 0, parts[peer], first, min(_BLOCK, len(parts[peer]) - first))

        _exhaust(self._flow(max(map(len, parts)), _BLOCK, bring, None, take))

    def _flow(
        self,
        length: int,
        step: int,
        bring: Callable[[int, list[np.ndarray]], None],
        combine: Callable[[int, list[np.ndarray]], None] | None,
        take: Callable[[int, list[np.ndarray]], None] | None,
    ) -> Iterator[None]:
        """Block after block of `step` bytes: when one has been brought, the one before is combined, then taken.

        Yields after each meeting.
        """
        delay = 0 if combine is None else 1
        blocks = -(-length // step)
        for i in range(blocks + delay):
            if i < blocks:
                bring(i * step, self._slots[self._ticks % _SLOTS])
            if combine is not None and i > 0:
                combine((i - 1) * step, self._slots[(self._ticks - 1) % _SLOTS])
            self.tick()
            yield
            if take is not None and i >= delay:
                take((i - delay) * step, self._slots[(self._ticks - 1 - delay) % _SLOTS])


class _Window:
    """Buffers that are combined where they lie. Each rank hands out its own; the places need not be the same."""

    def __init__(self, segments: list[np.ndarray], rank: int, capacity: int) -> None:
        self.capacity = capacity
        self._segments, self._rank, self._size = segments, rank, len(segments)
        self._address = segments[rank].ctypes.data
        # Of memoryviews: a slice of a slice of an array refers to the whole array only, not to the slice.
        mine = segments[rank].data
        self._buffers = RecycledBuffers.of(
            [
                np.frombuffer(mine[PAGE + i * capacity : PAGE + (i + 1) * capacity], np.uint8)
                for i in range(_BUFFERS)
            ]
        )

    def take(self, nbytes: int) -> np.ndarray | None:
        return self._buffers.free(nbytes)

    def place_of(self, memory: np.ndarray) -> int:
        """Where `memory` begins in this rank's segment; NOWHERE for other memory."""
        place = int(memory.ctypes.data) - self._address
        return place if 0 < place < len(self._segments[self._rank]) else NOWHERE

    def all_reduce(
        self, how: Arithmetic, places: Sequence[int], nbytes: int, scale: float | None
    ) -> None:
        """Combine this rank's slice of all buffers, into all of them. Ranks meet before and after."""
        buffers = [
            how.view(segment[place : place + nbytes])
            for segment, place in zip(self._segments, places, strict=True)
        ]
        elements, chunk = nbytes // how.itemsize, _CHUNK // how.itemsize
        first, end = (elements * i // self._size for i in (self._rank, self._rank + 1))
        for start in range(first, end, chunk):
            pieces = [buffer[start : min(start + chunk, end)] for buffer in buffers]
            mine = pieces[self._rank]
            how.combine(pieces, mine, scale)
            for peer, piece in enumerate(pieces):
                if peer != self._rank:
                    piece[:] = mine


def _exhaust(flow: Iterator[None]) -> None:
    for _ in flow:
        pass


def _median_seconds(reduce: Callable[[Array], None], buffer: np.ndarray) -> float:
    tries = []
    for _ in range(1 + _COMPARED_TIMES):
        started = time.perf_counter()
        reduce(buffer)
        tries.append(time.perf_counter() - started)
    return sorted(tries[1:])[_COMPARED_TIMES // 2]


def _size_of(buffer: Array) -> int:
    return int(buffer.nbytes)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _width(size: int) -> int:
    """Bytes of a block that each of `size` ranks combines: whole cache lines, which hold whole elements."""
    return max(64, min(_WIDTH, _BLOCK // size // 64 * 64))


def _copy(source: np.ndarray, start: int, target: np.ndarray, place: int, length: int) -> None:
    """As many of `length` bytes as there are in both."""
    length = min(length, len(source) - start, len(target) - place)
    if length > 0:
        target[place : place + length] = source[start : start + length]


if platform.machine() in ("x86_64", "AMD64"):

    def _before_others_see() -> None:
        """Nothing: stores become visible in their order."""

else:
    _fence = threading.Lock()

    def _before_others_see() -> None:
        """Stores before this become visible before those after it: taking a lock twice is a full barrier."""
        with _fence:
            pass
        with _fence:
            pass
