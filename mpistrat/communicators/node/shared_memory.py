"""Memory that the ranks of a node share: each rank makes a segment, and all ranks map it.

A segment is an anonymous file of the kernel (memfd_create). It has no name, and the size of /dev/shm does not limit it.
It disappears with the last process that maps it, however the process ends. MPI would put windows into files in
/dev/shm; a container limits /dev/shm to 64 MB, and a killed job leaves its files there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

_HUGE = 1 << 21
_MFD_CLOEXEC = 1  # <linux/memfd.h>

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value

# By the address of a mapping, the bytes that count as this process's memory.
_counted: dict[int, int] = {}


def share(
    nbytes: int, rank: int, all_gather_object: Callable[[Any], list[Any]], *, populate: bool
) -> tuple[list[np.ndarray] | None, str]:
    """Make a segment of `nbytes` zeros on every rank, and map all of them. Collective over the ranks of a node.

    Args:
        nbytes: bytes of each segment; equal on all ranks.
        rank: this rank's number on the node.
        all_gather_object: gathers an object of each rank, in rank order.
        populate: True allocates all pages now, so that they count as memory of this rank. If False, a page counts as
            memory of the rank that writes it first.

    Returns: the segments as bytes, in rank order, and ""; None and the reason, if a rank could not make or map one.
    """
    descriptor, why = new_file(nbytes, rank, populate=populate)
    segments: list[np.ndarray] = []
    try:
        files = all_gather_object((os.getpid(), descriptor, why))
        if not first_failure(failure for *_, failure in files):
            try:
                segments = [
                    mapped(descriptor, nbytes, counted=nbytes)
                    if peer == rank
                    else _opened(f"/proc/{pid}/fd/{number}", nbytes)
                    for peer, (pid, number, _) in enumerate(files)
                ]
            except (OSError, ValueError) as error:
                why = f"rank {rank} could not map the shared memory of another rank: {error}"
        # All ranks have opened the other ranks' files by now, so each may close its own.
        failure = first_failure(all_gather_object(why))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return (None, failure) if failure else (segments, "")


def new_file(nbytes: int, rank: int, *, populate: bool) -> tuple[int, str]:
    """Make a file of `nbytes` bytes in memory. `populate` allocates its pages now.

    Returns: its descriptor and ""; -1 and the reason if this rank could not make it.
    """
    try:
        descriptor = anonymous_file()
        try:
            os.truncate(descriptor, nbytes)
            if populate:
                os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        return -1, f"rank {rank} could not make {nbytes} bytes of shared memory: {error}"
    return descriptor, ""


def first_failure(reasons: Iterable[str]) -> str:
    """Return the first reason that is not ""; "" if there is none."""
    return next(filter(None, reasons), "")


def own_bytes() -> int:
    """Return how many bytes of mapped shared memory count as this process's."""
    return sum(_counted.values())


def anonymous_file() -> int:
    """Return the descriptor of a new file in memory. Raises: OSError if the system cannot make one."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mpistrat")
    # conda builds Python for systems that are older than memfd_create.
    if not hasattr(_C, "memfd_create"):
        raise OSError(errno.ENOSYS, "the C library has no memfd_create (glibc 2.27)")
    descriptor: int = _C.memfd_create(b"mpistrat", _MFD_CLOEXEC)
    if descriptor < 0:
        raise _error()
    return descriptor


def _opened(path: str, nbytes: int) -> np.ndarray:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mapped(descriptor, nbytes)
    finally:
        os.close(descriptor)


def mapped(descriptor: int, nbytes: int, *, counted: int = 0, private: bool = False) -> np.ndarray:
    """Map a file as bytes, until nothing refers to them.

    The C library maps the file, since Python's mmap would keep a descriptor open for each mapping.

    Args:
        counted: the number of bytes that count as this process's.
        private: True keeps writes in this mapping; False writes to the file.

    Raises: OSError if the system cannot map it.
    """
    read_write = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _C.mmap(None, nbytes, read_write, kind, descriptor, 0)
    if address == _MAP_FAILED:
        raise _error()
    if nbytes >= _HUGE:
        _C.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # where the administrator allows it
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    unmap = weakref.finalize(memory, _unmap, address, nbytes)
    unmap.atexit = False  # other threads may still read it, and the process is about to end
    if counted:
        _counted[address] = counted
    return np.frombuffer(memoryview(memory), np.uint8)


def forget_written(memory: np.ndarray) -> None:
    """Drop the writes to whole pages of a private mapping, so that they show the file again. Raises: OSError."""
    if _C.madvise(memory.ctypes.data, len(memory), mmap.MADV_DONTNEED) != 0:
        raise _error()


def _unmap(address: int, nbytes: int) -> None:
    _counted.pop(address, None)
    _C.munmap(address, nbytes)


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_lock = threading.Lock()


def _full_barrier() -> None:
    """Take a lock twice: no memory access overtakes the release of a lock and the next acquire of the same lock."""
    with _lock:
        pass
    with _lock:
        pass


# All ranks that share memory see memory accesses before the fence earlier than accesses after it. Processors of the x86
# family keep the order of loads, and the order of stores, without a fence.
FENCE: Callable[[], None] | None = (
    None if platform.machine() in ("x86_64", "AMD64") else _full_barrier
)


def before_others_see() -> None:
    """Order this rank's memory accesses for the other ranks; do nothing where the processor does so itself."""
    if FENCE is not None:
        FENCE()
