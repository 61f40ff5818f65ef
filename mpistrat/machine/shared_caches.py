"""The caches that processors share."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

_DEVICES = "/sys/devices/system/cpu"


def caches_of(
    cpus: Collection[int], devices: str = _DEVICES, described: str = "/proc/cpuinfo"
) -> tuple[str, ...]:
    """Return the caches that all of `cpus` share, sorted: each as its level and its processors, a hexadecimal mask.

    Such as ("2 00000003", "3 000000ff"). An empty tuple if they share none, as for a process that is not bound. Empty
    also if the kernel does not know, and in a virtual machine, because its host moves the processors.
    """
    found = set()
    wanted = sum(1 << cpu for cpu in set(cpus))
    with contextlib.suppress(OSError, ValueError):
        if "hypervisor" in Path(described).read_text(encoding="utf-8"):
            return ()
        for folder in Path(devices).glob(f"cpu{min(cpus)}/cache/index*"):
            level = (folder / "level").read_text(encoding="utf-8").strip()
            sharing = (folder / "shared_cpu_map").read_text(encoding="utf-8").strip()
            mask = int(sharing.replace(",", ""), 16)
            if wanted & mask == wanted:
                found.add(f"{level} {sharing}")
    return tuple(sorted(found))
