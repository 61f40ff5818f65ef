"""What the kernel's control groups (Slurm's, a container's, systemd's) allow this process. Versions 1 and 2."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True)
class Allowed:
    """CPUs' worth of time, and bytes of memory; None: no limit. Pages that the kernel can drop count as free."""

    cpus: float | None = None
    memory: int | None = None
    memory_used: int = 0


def allowed(groups: str = "/proc/self/cgroup", mounts: str = "/sys/fs/cgroup") -> Allowed:
    """The tightest limits of this process's groups and of the groups around them."""
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []
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
                taken = int(_read(folder / used) or 0) - number_in(folder / "memory.stat", cache)
                memory.append((int(text), max(0, taken)))
    limit_, used_ = min(memory, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return Allowed(min(cpus, default=None), limit_, used_)


def most_memory() -> float:
    """Bytes that this process could have if it were alone; inf where nobody knows."""
    group = allowed()
    known = [group.memory] if group.memory is not None else []
    machine = Path("/proc/meminfo")
    if total := number_in(machine, "MemTotal"):
        known.append(1024 * (total + number_in(machine, "SwapTotal")))
    return min(known, default=math.inf)


def _folders(groups: str, mounts: str) -> Iterator[Path]:
    """The folders of the groups and of the groups around them. A container has only what is mounted there."""
    for line in _read(Path(groups)).splitlines():
        _, controllers, path = line.split(":", 2)  # "4:memory:/slurm/uid_0/job_7", "0::/user.slice"
        tops = [Path(mounts), *(Path(mounts, name) for name in controllers.split(",") if name)]
        for top in tops:
            folder = Path(os.path.normpath(f"{top}/{path}"))
            while folder.is_relative_to(top):
                if folder.is_dir():
                    yield folder
                folder = folder.parent


def number_in(file: Path, name: str) -> int:
    """81920 of a line such as "NAME 81920" or "NAME:  81920 kB"; 0 where there is none."""
    found = re.search(rf"^{name}:?\s+(\d+)", _read(file), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(file: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8").strip()
    return ""
