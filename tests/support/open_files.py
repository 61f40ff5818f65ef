"""What this process has open: for tests that nothing is left open."""

import contextlib
import os
from collections.abc import Iterator


def descriptors(kind: str) -> int:
    """How many descriptors of files there are whose names, as /proc shows them, contain `kind`."""
    return sum(kind in name for name in _names())


def _names() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def mapped_bytes(kind: str) -> int:
    """Of files whose names contain `kind`."""
    total = 0
    with open("/proc/self/maps") as lines:
        for line in lines:
            if kind in line:
                begin, end = line.split()[0].split("-")
                total += int(end, 16) - int(begin, 16)
    return total
