"""Collectives of the ranks of one node through memory that they share.

A reduction is a reduce-scatter straight out of the peers' memory, then a copy of the rest: each rank combines one slice
of every rank's buffer. What lies in the window already is combined where it is, and nothing is copied in.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays import Array, dtype_name
from mpistrat.cluster_resolver.shared_memory_limit import SHARED_MB
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.host_views import as_buffer_of, view_of
from mpistrat.communicators.node_memory import NOWHERE, Scratch, Window, share_of
from mpistrat.communicators.shared_memory import share
from mpistrat.communicators.station import Station

# Below, MPI is not even compared with: two meetings in Python cost more than its whole message.
_SMALLEST = 1 << 15
_COMPARED = (1 << 20, 1 << 18, 1 << 16, 1 << 15)
_COMPARED_TIMES = 11


class SharedWindowCommunicator(Communicator):
    """Wraps the communicator of a node's ranks, which moves what is small, or not numbers.

    Args:
        inner: over ranks of one node.
        station: where ranks that wait are watched.
        limit: the most bytes that this rank may share; all ranks go by the smallest.

    Attributes:
        why_not: why there is no shared memory, where there is none: then `inner` does everything.
        smallest: bytes from which on a buffer outside the window is combined through it; measured at the first large
            one.
    """

    def __init__(self, inner: Communicator, station: Station, limit: float = math.inf) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._station, self._limit = station, limit
        self.why_not = ""
        self.smallest: float | None = None
        self._scratch: Scratch | None = None
        self._window: Window | None = None

    # Memory

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """`nbytes` of the window, uninitialized, to be combined where they are; None where there is no room.

        Collective, with equal `nbytes`; but each rank may or may not get one. The memory is used again once nothing
        refers to it.
        """
        if not nbytes or self._meeting() is None:
            return None
        if self._window is None or self._window.capacity < nbytes:
            size = Window.nbytes_for(nbytes)
            if Scratch.NBYTES + size > self._limit:
                return None
            segments, why = share(size, self.rank, self.inner.all_gather_object, populate=False)
            if segments is None:
                self._warn(
                    f"gradients are copied into it and out again, for {size} bytes cannot be had",
                    why,
                )
                self._limit = 0  # asked for no more
                return None
            self._window = Window(segments, self.rank)
        return self._window.take(nbytes)

    def _meeting(self) -> Scratch | None:
        """The scratch memory, made when it is first needed. Collective."""
        if self._scratch is None and not self.why_not:
            gather = self.inner.all_gather_object
            self._limit = min(gather(self._limit))
            if self._limit < Scratch.NBYTES:
                self.why_not = f"{SHARED_MB} allows less than {Scratch.NBYTES / 1e6:.1f} MB"
                return None
            segments, why = share(Scratch.NBYTES, self.rank, gather, populate=True)
            if segments is None:
                self.why_not = why
                self._warn("all messages go through MPI, which is slower", why)
            else:
                self._scratch = Scratch(segments, self.rank, self._station)
                self.smallest = self._compare()
        return self._scratch

    def _warn(self, what: str, why: str) -> None:
        if self.rank == 0:
            warnings.warn(
                f"no shared memory on this node, so {what}: {why}", RuntimeWarning, stacklevel=2
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

    def is_shared(self) -> bool:
        """Whether the ranks can share memory, which is tried at the first call. Collective."""
        return self._meeting() is not None

    def all_reduce_across(
        self,
        buffer: Array,
        op: str,
        out: Array | None,
        scale: float | None,
        carriers: int,
        across: Callable[[Array], None],
    ) -> None:
        """Combine `buffer` of this node's ranks and, slice by slice, of others'; where memory is shared.

        Args:
            carriers: how many ranks, from the first, combine a slice of equal size each.
            across: given a carrier's combined slice, combines it in place with those of other nodes.
        """
        scratch, how = self._meeting(), arithmetic_of(dtype_name(buffer), op)
        assert scratch is not None
        assert how is not None
        nbytes = _size_of(buffer)
        source, target = _bytes(view_of(buffer)), _bytes(view_of(buffer if out is None else out))
        bounds = share_of(nbytes, how.itemsize, self.size, carriers)
        first, end = bounds[self.rank]
        total = how.totals((end - first) // how.itemsize)
        window, places = self._window, [NOWHERE]
        if window is not None and nbytes <= window.capacity:
            places = scratch.tell(NOWHERE if out is not None else window.place_of(source))
        if window is not None and NOWHERE not in places:
            window.combine(how, places, (first, end), total)
        else:
            scratch.reduce_scatter(how, source, bounds, total)
        if first < end:
            across(total)
            if scale is not None:
                total *= scale
        if window is not None and NOWHERE not in places:
            window.spread(how, places, (first, end), total)
            scratch.tick()  # nobody goes on while others read or write its memory
        else:
            if first < end:
                how.view(target[first:end])[:] = total
            self.gather_slices(target, bounds)

    def gather_slices(self, memory: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
        """Fill `memory` with every rank's slice of it, between its bounds in bytes; where memory is shared."""
        scratch = self._meeting()
        assert scratch is not None
        slices = [memory[first:end] for first, end in bounds]
        scratch.all_gather(slices[self.rank], slices)

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
            bounds = share_of(nbytes, nbytes // self.size, self.size)
            total = how.view(_bytes(view_of(out)))
            scratch.reduce_scatter(how, _bytes(view_of(buffer)), bounds, total)

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

    def explain(self) -> str:
        if self.why_not:
            return f"{self.size} ranks of a node, without shared memory: {self.why_not}\n{self.inner.explain()}"
        if self._scratch is None:
            return f"{self.size} ranks of a node, which have combined nothing large yet\n{self.inner.explain()}"
        window = "none"
        if self._window is not None:
            window = f"up to {self._window.nbytes_for(self._window.capacity) / 1e6:.1f} MB, as far as it is used"
        return (
            f"{self.size} ranks of a node, through shared memory: what lies in its window, and all else from "
            f"{self.smallest} bytes on, as measured\n"
            f"    of each rank: {Scratch.NBYTES / 1e6:.1f} MB for blocks in flight; window: {window}\n"
            f"{self.inner.explain()}"
        )

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
