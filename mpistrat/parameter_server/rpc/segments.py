"""Regions of a process's memory that the other processes of its node map, read and write in place."""

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
_SLAB = 1 << 22  # bytes of a file that several small regions share


def whole_lines(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of a cache line (64 bytes)."""
    return -(-nbytes // _LINE) * _LINE


class RegionHandle(NamedTuple):
    """Names a region of shared memory for another process, which opens it as /proc/PID/fd/N.

    Attributes:
        pid, descriptor: the process that has made the region, and its descriptor of the in-memory file.
        inode: the file's inode, because the descriptor may later belong to another file.
        size: the file's size in bytes.
        first: the region's offset in the file, in bytes.
    """

    pid: int
    descriptor: int
    inode: int
    size: int
    first: int
    nbytes: int


class SharedRegion(NamedTuple):
    """A region of this process's memory (an array of bytes), and its handle for other processes."""

    memory: np.ndarray
    handle: RegionHandle

    def part(self, first: int, nbytes: int) -> SharedRegion:
        handle = self.handle._replace(first=self.handle.first + first, nbytes=nbytes)
        memory = self.memory[first : first + nbytes]
        return SharedRegion(memory, handle)


_NOTHING = SharedRegion(np.empty(0, np.uint8), RegionHandle(0, 0, 0, 0, 0, 0))


class Segments:
    """Makes regions of shared memory, in in-memory files. A region of 1 MB or more has its own file; others share."""

    def __init__(self) -> None:
        self._rest = _NOTHING  # the free part of the file that small regions share

    def make(self, nbytes: int) -> SharedRegion:
        """Return a new region of `nbytes` zeros.

        Raises: OSError or MemoryError if the system gives no more files or memory.
        """
        if nbytes >= _SLAB // 4:
            return _region_of_file(nbytes)
        room = whole_lines(max(nbytes, 1))
        if room > len(self._rest.memory):
            self._rest = _region_of_file(_SLAB)
        region = self._rest.part(0, nbytes)
        left = len(self._rest.memory) - room
        self._rest = self._rest.part(room, left)
        return region


def _region_of_file(nbytes: int) -> SharedRegion:
    descriptor = _new_file()
    try:
        os.truncate(descriptor, nbytes)
        memory = mapped(descriptor, nbytes, counted=nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    # Other processes open the file through this process, so the file stays open while the memory is used. Each part of
    # the array keeps the base alive.
    weakref.finalize(memory.base, os.close, descriptor).atexit = False
    inode = os.fstat(descriptor).st_ino
    handle = RegionHandle(os.getpid(), descriptor, inode, nbytes, 0, nbytes)
    return SharedRegion(memory[:nbytes], handle)


def _new_file() -> int:
    """Return the descriptor of a new in-memory file; raise the soft limit of open files if needed.

    Raises: OSError if the hard limit of open files is reached.
    """
    try:
        return anonymous_file()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    # The soft limit is often 1,024; a large model has more arrays.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return anonymous_file()


class Buffers:
    """Regions for the arrays in requests and replies; regions given back are used again. Called by: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments = Segments()
        self._free: dict[int, list[SharedRegion]] = {}

    def take(self, nbytes: int) -> SharedRegion:
        """Return a region of at least `nbytes`, with any content. The caller gives it back by `give_back`."""
        # Sizes are powers of two, so idle regions of all sizes take at most twice the memory of the largest. Pages that
        # no process has written take no memory.
        size = max(_PAGE, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            return free.pop() if free else self._segments.make(size)

    def give_back(self, region: SharedRegion | None) -> None:
        """Recycle a region that no process uses any more. None does nothing."""
        if region is not None:
            with self._lock:
                self._free.setdefault(region.handle.nbytes, []).append(region)


_FileKey = tuple[int, int, int]  # the first fields of a RegionHandle


class Mappings:
    """Regions of other processes' memory, mapped into this process."""

    def __init__(self) -> None:
        self._files: dict[_FileKey, np.ndarray] = {}

    def at(self, handle: RegionHandle) -> np.ndarray:
        """Return the region as a uint8 array in the shared memory itself. The region's file is mapped once, and kept.

        Raises: OSError if the region's process had died before its file was mapped.
        """
        key = handle[:3]
        memory = self._files.get(key)
        if memory is None:
            path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_ino != handle.inode:
                    raise OSError(f"{path} is another file here, not that of the region")
                memory = mapped(descriptor, handle.size)
            finally:
                os.close(descriptor)
            self._files[key] = memory
        return memory[handle.first : handle.first + handle.nbytes]

    def forget(self, pid: int | None) -> None:
        """Unmap the regions of a process that has died; do nothing for None."""
        self._files = {key: memory for key, memory in self._files.items() if key[0] != pid}
