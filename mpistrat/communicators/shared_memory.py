"""Memory that the ranks of a node share: a segment of each rank's, mapped by all.

A segment is an anonymous file of the kernel's (memfd_create), which has no name, is not limited by the size of
/dev/shm, and is gone with the last process that maps it, however that ended. Windows of MPI would be files in /dev/shm,
which a container limits to 64 MB and which a killed job leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

_HUGE = 1 << 21
_MFD_CLOEXEC = 1  # <linux/memfd.h>


def share(
    nbytes: int, rank: int, all_gather_object: Callable[[Any], list[Any]], *, populate: bool
) -> tuple[list[np.ndarray] | None, str]:
    """Every rank's segment of `nbytes` zeros, in rank order, as bytes; this rank's own stands at `rank`.

    Collective over ranks of one node. A page counts as memory of the rank that writes it first; with `populate` all are
    written now.
    Returns: None for the segments where a rank could not make or map them, and why not.
    """
    descriptor, why = -1, ""
    segments: list[np.ndarray] = []
    try:
        try:
            descriptor = _anonymous_file()
            os.truncate(descriptor, nbytes)
            if populate:
                os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            why = f"rank {rank} could not make {nbytes} bytes of shared memory: {error}"
        everyone = all_gather_object((os.getpid(), descriptor, why))
        if not any(failed for _, _, failed in everyone):
            try:
                segments = [
                    _mapped(descriptor if peer == rank else f"/proc/{pid}/fd/{theirs}", nbytes)
                    for peer, (pid, theirs, _) in enumerate(everyone)
                ]
            except (OSError, ValueError) as error:
                why = f"rank {rank} could not map the shared memory of another rank: {error}"
        # All have opened theirs before any closes its own.
        failures = [failed for failed in all_gather_object(why) if failed]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return (None, failures[0]) if failures else (segments, "")


def _anonymous_file() -> int:
    """Its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mpistrat")
    # conda's Python was built for systems that did not have it yet.
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, "the C library has no memfd_create (glibc 2.27)")
    descriptor: int = library.memfd_create(b"mpistrat", _MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _mapped(file: int | str, nbytes: int) -> np.ndarray:
    descriptor = file if isinstance(file, int) else os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(descriptor, nbytes)
    finally:
        if not isinstance(file, int):
            os.close(descriptor)
    if nbytes >= _HUGE:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)  # where the administrator allows it
    return np.frombuffer(mapping, np.uint8)
