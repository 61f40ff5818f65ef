"""Memory that the ranks of a node share: each rank makes a segment (a piece of memory), and all ranks map it.

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_HUGE = 1 << 21
_MFD_CLOEXEC = 1  # <linux/memfd.h>

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
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
        all_gather_object: returns the objects of all ranks, in rank order; it is called twice.
        populate: True allocates all pages now, and a lack of memory is found now. If False, the system allocates a page
            when a rank first writes it, and counts it as memory of that rank.

    Returns: the segments as arrays of bytes, in rank order, and ""; on all ranks None and the first reason if any rank
        could not make or map a segment.
    """
    descriptor, why = new_file(nbytes, rank, populate=populate)
    segments: list[np.ndarray] = []
    try:
        files = all_gather_object((os.getpid(), descriptor, why))
        if not first_failure(failure for *_, failure in files):
            try:
                segments = _all_mapped(files, rank, nbytes)
            except (OSError, ValueError) as error:
                why = f"rank {rank} could not map the shared memory of another rank: {error}"
        # All ranks have opened the other ranks' files by now, so each may close its own.
        failure = first_failure(all_gather_object(why))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if failure:
        return None, failure
    return segments, ""


def _all_mapped(files: Sequence[tuple[int, int, str]], rank: int, nbytes: int) -> list[np.ndarray]:
    """Map the segments of all ranks, in rank order.

    Args: files: for each rank, its process id, its segment's open descriptor, and the reason why it has none: "" here.
    """
    segments = []
    for peer, (pid, descriptor, _) in enumerate(files):
        if peer == rank:
            segment = mapped(descriptor, nbytes, counted=nbytes)
        else:
            segment = _opened(f"/proc/{pid}/fd/{descriptor}", nbytes)
        segments.append(segment)
    return segments


def new_file(nbytes: int, rank: int, *, populate: bool) -> tuple[int, str]:
    """Make a file of `nbytes` zeros in memory. With `populate`, the system allocates its pages now.

    Returns: its open descriptor, which the caller closes, and ""; -1 and the reason if this rank could not make it.
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
    """Return the bytes of shared memory that count as this process's own: the `counted` bytes of its mappings."""
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
    """Map a file, and return its bytes. The mapping ends when nothing refers to the array any more.

    The C library maps the file, because Python's mmap would keep a descriptor open for each mapping.

    Args:
        counted: the number of bytes that `own_bytes` adds for this mapping, while it exists.
        private: True: writes stay in this mapping; False: they go to the file.

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
    """Drop this process's writes to whole pages of a private mapping, so that the pages show the file again.

    Raises: OSError if the system refuses.
    """
    if _C.madvise(memory.ctypes.data, len(memory), mmap.MADV_DONTNEED) != 0:
        raise _error()


def _unmap(address: int, nbytes: int) -> None:
    _counted.pop(address, None)
    _C.munmap(address, nbytes)


def _error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_lock = threading.Lock()


def _full_barrier() -> None:
    """Order memory accesses before this call and after it, by releasing a lock and acquiring it again."""
    with _lock:
        pass
    with _lock:
        pass


# A function that a rank calls between memory accesses that other ranks must see in this order. None on the x86 family,
# because its processors keep the order of loads, and the order of stores.
FENCE: Callable[[], None] | None = (
    None if platform.machine() in ("x86_64", "AMD64") else _full_barrier
)


def before_others_see() -> None:
    """Let other ranks see this rank's earlier writes before its later ones; on x86 processors, do nothing."""
    if FENCE is not None:
        FENCE()
