"""Buffers on GPUs: where they go another way than buffers on the host, and the way that always works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpistrat.arrays import Array, copy, is_on_gpu, is_torch, to_device_of, to_host
from mpistrat.communicators.communicator import Communicator, Wire
from mpistrat.communicators.device_library import DeviceLibrary, library_of
from mpistrat.communicators.station import Station
from mpistrat.communicators.waiting import wait_until
from mpistrat.communicators.wrapping import BesideHost

if TYPE_CHECKING:
    from mpistrat.communicators.reduction_tree import ReductionTree


class DeviceCommunicator(BesideHost):
    """Takes buffers on GPUs, too; here they are copied to the host, where `inner` combines them.

    A collective returns when its result is there: what hangs or fails does so inside it, where it is watched, and
    collectives on one GPU by different means (NCCL and a CUDA-aware MPI) are never in flight together, which can
    deadlock.

    Args:
        inner: for buffers on the host, and what is no buffer.
        index: the number of this process's GPU. A buffer on another GPU is copied there and back.
        station: where ranks that wait are watched.
        why: what is told of this way.
    """

    def __init__(self, inner: Communicator, index: int, station: Station, why: str = "") -> None:
        super().__init__(inner)
        self._index, self._station, self._why = index, station, why
        self._libraries: dict[bool, DeviceLibrary] = {}

    # What the subclasses do in their own way

    def _combine(self, buffer: Array, op: str, scale: float | None) -> None:
        """`all_reduce` in place of a buffer on this rank's GPU."""
        self.combine_on_host(buffer, op, scale)

    def _spread(self, buffer: Array, root: int) -> None:
        """`broadcast` of such a buffer."""
        self.wait_for_current_stream(buffer)
        host = to_host(buffer)
        self.inner.broadcast(host, root)
        buffer[...] = to_device_of(host, buffer)

    def _gather(self, buffer: Array) -> list[Array]:
        """`all_gather` of such a buffer."""
        self.wait_for_current_stream(buffer)
        return [to_device_of(part, buffer) for part in self.inner.all_gather(to_host(buffer))]

    # The collectives

    def all_reduce(
        self,
        buffer: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        label: str = "",
        error: Exception | None = None,
        scale: float | None = None,
        wire: Wire | None = None,
    ) -> None:
        if not is_on_gpu(buffer):
            self.inner.all_reduce(buffer, op, out=out, scale=scale, wire=wire)
            return
        target = buffer
        if out is not None:
            out[...] = buffer
            target = out
        if wire is not None:  # works on the host, on the whole buffer
            self._on_this_gpu(target, lambda here: self.combine_on_host(here, op, scale, wire))
        else:
            self._on_this_gpu(target, lambda here: self._combine(here, op, scale))

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, *, label: str = "", scale: float | None = None
    ) -> None:
        if not is_on_gpu(sums):
            self.inner.all_reduce_by_tree(sums, tree, scale=scale)
            return
        self.wait_for_current_stream(sums)
        host = to_host(sums)
        self.inner.all_reduce_by_tree(host, tree, scale=scale)
        sums[0] = to_device_of(host[0], sums)

    def start_all_reduce(self, buffer: Array, op: str = "sum") -> Callable[[], bool]:
        if not is_on_gpu(buffer):
            return self.inner.start_all_reduce(buffer, op)
        self.all_reduce(buffer, op)
        return lambda: True

    def reduce(self, buffer: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        if not is_on_gpu(buffer):
            self.inner.reduce(buffer, root, op)
            return
        total = copy(buffer)
        self.all_reduce(total, op)
        if self.rank == root:
            buffer[...] = total

    def reduce_scatter(
        self, buffer: Array, out: Array, op: str = "sum", *, label: str = ""
    ) -> None:
        if not is_on_gpu(buffer):
            self.inner.reduce_scatter(buffer, out, op)
            return
        total = copy(buffer)
        self.all_reduce(total, op)
        length = out.shape[0]
        out[...] = total[self.rank * length : (self.rank + 1) * length]

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        if not is_on_gpu(buffer):
            self.inner.broadcast(buffer, root)
            return
        self._on_this_gpu(buffer, lambda here: self._spread(here, root))

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        if not is_on_gpu(buffer):
            return self.inner.all_gather(buffer)
        library = self.library(buffer)
        here = library.here(buffer)
        with library.device():
            return self._gather(here)

    def explain(self) -> str:
        return f"buffers on GPUs: {self._why}\nbuffers on the host: {self.inner.explain()}"

    # Help for the ways

    def library(self, buffer: Array) -> DeviceLibrary:
        kind = is_torch(buffer)
        if kind not in self._libraries:
            self._libraries[kind] = library_of(buffer, self._index)
        return self._libraries[kind]

    def combine_on_host(
        self, buffer: Array, op: str, scale: float | None, wire: Wire | None = None
    ) -> None:
        self.wait_for_current_stream(buffer)
        host = to_host(buffer)
        self.inner.all_reduce(host, op, scale=scale, wire=wire)
        buffer[...] = to_device_of(host, buffer)

    def wait_for_current_stream(self, buffer: Array) -> None:
        """Until what the program has given to the GPU so far is done, `buffer` included."""
        library = self.library(buffer)
        self.wait(library, library.record(library.current_stream()))

    def wait(self, library: DeviceLibrary, event: Any) -> None:
        wait_until(lambda: library.is_done(event), self._station)

    def _on_this_gpu(self, buffer: Array, collective: Callable[[Array], None]) -> None:
        library = self.library(buffer)
        here = library.here(buffer)
        with library.device():
            collective(here)
        if here is not buffer:
            buffer[...] = to_device_of(to_host(here), buffer)
