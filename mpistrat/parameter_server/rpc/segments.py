"""Memory of a process that the other processes of its node map, to read and write it in place."""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from typing import NamedTuple

import numpy as np

from mpistrat.communicators.node.shared_memory import anonymous_file, mapped

_LINE = 64  # bytes of a cache line
_PAGE = 4096
_SLAB = 1 << 22  # bytes of a file that small regions share


def whole_lines(nbytes: int) -> int:
    """`nbytes`, rounded up to whole cache lines."""
    return -(-nbytes // _LINE) * _LINE


class RegionHandle(NamedTuple):
    """All that another process needs to map a region."""

    pid: int
    descriptor: int
    inode: int  # a descriptor may be another file's later
    size: int  # of the file
    first: int
    nbytes: int


class SharedRegion(NamedTuple):
    """Bytes of this process, and the handle by which others map them."""

    memory: np.ndarray
    handle: RegionHandle

    def part(self, first: int, nbytes: int) -> SharedRegion:
        handle = self.handle._replace(first=self.handle.first + first, nbytes=nbytes)
        return SharedRegion(self.memory[first : first + nbytes], handle)


_NOTHING = SharedRegion(np.empty(0, np.uint8), RegionHandle(0, 0, 0, 0, 0, 0))


class Segments:
    """Makes regions. A large region is a file in memory of its own; small ones share files, which are kept."""

    def __init__(self) -> None:
        self._rest = _NOTHING  # of the file that small regions share

    def make(self, nbytes: int) -> SharedRegion:
        """`nbytes` of zeros. Raises: OSError, MemoryError."""
        if nbytes >= _SLAB // 4:
            return _region_of_file(nbytes)
        room = whole_lines(max(nbytes, 1))
        if room > len(self._rest.memory):
            self._rest = _region_of_file(_SLAB)
        region = self._rest.part(0, nbytes)
        self._rest = self._rest.part(room, len(self._rest.memory) - room)
        return region


def _region_of_file(nbytes: int) -> SharedRegion:
    descriptor = _new_file()
    try:
        os.truncate(descriptor, nbytes)
        memory = mapped(descriptor, nbytes, counted=nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    # The others open the file through this process, so it stays open while the memory is used. Each part of the array
    # refers to its base.
    weakref.finalize(memory.base, os.close, descriptor).atexit = False
    inode = os.fstat(descriptor).st_ino
    return SharedRegion(
        memory[:nbytes], RegionHandle(os.getpid(), descriptor, inode, nbytes, 0, nbytes)
    )


def _new_file() -> int:
    """Raises: OSError: this process has as many files open as its hard limit allows."""
    try:
        return anonymous_file()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    # The soft limit is often 1,024, less than the arrays of a large model.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return anonymous_file()


class Buffers:
    """Recycled regions, by size, which the other side of a request reads or fills. Called by: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments = Segments()
        self._free: dict[int, list[SharedRegion]] = {}

    def take(self, nbytes: int) -> SharedRegion:
        """A region of at least `nbytes`, to be given back."""
        # There are few sizes, so that idle memory is at most twice the largest. Unwritten pages take no memory.
        size = max(_PAGE, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            return free.pop() if free else self._segments.make(size)

    def give_back(self, region: SharedRegion | None) -> None:
        """Recycle a region that nobody uses any more, here or elsewhere."""
        if region is not None:
            with self._lock:
                self._free.setdefault(region.handle.nbytes, []).append(region)


class Mappings:
    """Other processes' regions, mapped here."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int, int], np.ndarray] = {}

    def at(self, handle: RegionHandle) -> np.ndarray:
        """The region's bytes. Raises: OSError: the process had died before."""
        key = handle[:3]
        memory = self._files.get(key)
        if memory is None:
            path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_ino != handle.inode:
                    raise OSError(f"{path} is another file here")
                memory = mapped(descriptor, handle.size)
            finally:
                os.close(descriptor)
            self._files[key] = memory
        return memory[handle.first : handle.first + handle.nbytes]

    def forget(self, pid: int | None) -> None:
        """Unmap the regions of a process that has died."""
        for key in [key for key in self._files if key[0] == pid]:
            del self._files[key]
