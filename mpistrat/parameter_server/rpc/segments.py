"""Memory of a process that others of its node map: they read and write it where it lies."""

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
_SLAB = 1 << 22  # what is smaller shares a file


class RegionHandle(NamedTuple):
    """Where bytes lie: what another process needs to map them."""

    pid: int
    descriptor: int
    inode: int  # a descriptor may be another file's later
    size: int  # of the file
    first: int
    nbytes: int


class Region:
    """Bytes of this process that others map.

    Attributes:
        memory: the bytes.
        handle: for the others.
    """

    __slots__ = ("handle", "memory")

    def __init__(self, memory: np.ndarray, handle: RegionHandle) -> None:
        self.memory, self.handle = memory, handle


class Segments:
    """Makes regions. A file in memory for each large one; small ones share some, which are kept."""

    def __init__(self) -> None:
        self._slab: np.ndarray | None = None
        self._slab_handle: RegionHandle | None = None
        self._used = 0

    def make(self, nbytes: int) -> Region:
        """`nbytes` of zeros. Raises: OSError, MemoryError."""
        if nbytes >= _SLAB // 4:
            memory, handle = self._file(nbytes)
            return Region(memory[:nbytes], handle._replace(nbytes=nbytes))
        room = -(-max(nbytes, 1) // _LINE) * _LINE
        if self._slab is None or self._used + room > _SLAB:
            (self._slab, self._slab_handle), self._used = self._file(_SLAB), 0
        first, self._used = self._used, self._used + room
        assert self._slab_handle is not None
        # Of the memoryview: a slice of a slice of an array refers to the whole array only.
        memory = self._slab[first : first + nbytes]
        return Region(memory, self._slab_handle._replace(first=first, nbytes=nbytes))

    def _file(self, nbytes: int) -> tuple[np.ndarray, RegionHandle]:
        descriptor = _new_file()
        try:
            os.truncate(descriptor, nbytes)
            memory = mapped(descriptor, nbytes, own=nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        # Open as long as the memory is used: the others open it through this process.
        weakref.finalize(memory.base, os.close, descriptor).atexit = False
        inode = os.fstat(descriptor).st_ino
        return memory, RegionHandle(os.getpid(), descriptor, inode, nbytes, 0, nbytes)


def _new_file() -> int:
    """Raises: OSError where this process may not open more, by its hard limit."""
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
    """Regions that are used again and again, by size.

    For requests: what the other side is to read or to fill. Called by: any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments = Segments()
        self._free: dict[int, list[Region]] = {}

    def take(self, nbytes: int) -> Region:
        """A region of at least `nbytes`; give it back."""
        # Few sizes, so that what is kept is at most twice the largest. Pages that are not written take no memory.
        size = max(_PAGE, 1 << (nbytes - 1).bit_length()) if nbytes else _PAGE
        with self._lock:
            free = self._free.get(size)
            return free.pop() if free else self._segments.make(size)

    def give_back(self, region: Region) -> None:
        """Nobody uses it any more, here or elsewhere."""
        with self._lock:
            self._free.setdefault(region.handle.nbytes, []).append(region)


class Mappings:
    """Other processes' regions, mapped here."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int, int], np.ndarray] = {}

    def at(self, handle: RegionHandle) -> np.ndarray:
        """The bytes there. Raises: OSError when the process has died before."""
        key = (handle.pid, handle.descriptor, handle.inode)
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
        """The process has died."""
        for key in [key for key in self._files if key[0] == pid]:
            del self._files[key]
