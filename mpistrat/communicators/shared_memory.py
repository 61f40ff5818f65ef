"""Memory that the ranks of a node share: a segment of each rank's, mapped by all.

A segment is an anonymous file of the kernel's (memfd_create), which has no name, is not limited by the size of
/dev/shm, and is gone with the last process that maps it, however that ended. Windows of MPI would be files in /dev/shm,
which a container limits to 64 MB and which a killed job leaves behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

_HUGE = 1 << 21


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
            descriptor = os.memfd_create("mpistrat")
            os.truncate(descriptor, nbytes)
            if populate:
                os.posix_fallocate(descriptor, 0, nbytes)
        except (OSError, AttributeError) as error:
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
