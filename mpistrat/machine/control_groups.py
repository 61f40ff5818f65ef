"""The limits of CPU time and memory that the kernel's control groups set for this process. Versions 1 and 2.

Slurm, containers and systemd make control groups.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True)
class Allowed:
    """The limits of this process's control groups.

    Attributes:
        cpus: how many CPUs' worth of time the process may use: 2.0; None: no limit.
        memory: the limit of the group with the least memory left, in bytes; None: no limit.
        memory_used: bytes in use in that group, without file pages that the kernel can drop; 0 without a limit.
    """

    cpus: float | None = None
    memory: int | None = None
    memory_used: int = 0


def allowed(groups: str = "/proc/self/cgroup", mounts: str = "/sys/fs/cgroup") -> Allowed:
    """Return the tightest limits of this process's control groups and of the groups that contain them. No errors.

    The CPU limit is the lowest one. The memory limit and use are both of the group with the least memory left (limit
    minus use), even if another group has a lower limit.
    Args: groups, mounts: the file that lists the process's groups, and the groups' folder; tests give their own.
    Returns: None for a limit that no group sets.
    """
    cpus: list[float] = []
    memory: list[tuple[int, int, int]] = []  # bytes left, limit, bytes in use
    for folder in _folders(groups, mounts):
        version_1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        quota = _read(folder / "cpu.max") or version_1  # "200000 100000"; "max …", "-1 …": no limit
        if found := re.fullmatch(r"(\d+) (\d+)", quota):
            cpus.append(int(found[1]) / int(found[2]))
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            text = _read(folder / limit)
            if text.isdigit() and int(text) < _UNLIMITED:
                most = int(text)
                charged = int(_read(folder / used) or 0)
                reclaimable = number_in(folder / "memory.stat", cache)
                in_use = max(0, charged - reclaimable)
                memory.append((most - in_use, most, in_use))
    _, limit_, used_ = min(memory, default=(0, None, 0))
    return Allowed(min(cpus, default=None), limit_, used_)


def most_memory() -> float:
    """Return the most bytes of memory that this process could have if it ran alone on the machine.

    Returns: the control groups' limit or RAM plus swap, the lesser of the two; infinity if neither is known.
    """
    limit = allowed().memory
    machine = Path("/proc/meminfo")
    most = math.inf if limit is None else limit
    if total := number_in(machine, "MemTotal"):
        most = min(most, 1024 * (total + number_in(machine, "SwapTotal")))
    return most


def _folders(groups: str, mounts: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of the groups that contain them, as far as they exist.

    In a container, some are not mounted.
    """
    for line in _read(Path(groups)).splitlines():
        _, controllers, path = line.split(":", 2)  # "4:memory:/slurm/uid_0/job_7", "0::/user.slice"
        tops = [Path(mounts)]
        tops.extend(Path(mounts, name) for name in controllers.split(",") if name)
        for top in tops:
            folder = Path(os.path.normpath(f"{top}/{path}"))
            while folder.is_relative_to(top):
                if folder.is_dir():
                    yield folder
                folder = folder.parent


def number_in(file: Path, name: str) -> int:
    """Return the number in the line of `file` that begins with `name`; 0 if there is no such line or no file.

    The unit in the line is ignored: 81920 for "NAME 81920" and for "NAME:  81920 kB".
    """
    found = re.search(rf"^{name}:?\s+(\d+)", _read(file), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(file: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8").strip()
    return ""
