"""The network links of this node."""

from __future__ import annotations

import contextlib
from pathlib import Path


def network_links(devices: str = "/sys/class") -> tuple[str, ...]:
    """Return the speeds of this node's links that are up, each speed once: ("200 Gb/sec (4X HDR)", "25000 Mb/s").

    They are sorted as text. An empty tuple if the kernel names no link with a speed.
    """
    files = {
        "net/*/speed": "{} Mb/s",
        "infiniband/*/ports/*/rate": "{}",  # also for Omni-Path and Slingshot's RoCE
    }
    found = set()
    for pattern, described in files.items():
        for file in Path(devices).glob(pattern):
            with contextlib.suppress(OSError):  # a loopback link, or a link that is down
                text = file.read_text(encoding="utf-8").strip()
                if not text.startswith("-"):
                    found.add(described.format(text))
    return tuple(sorted(found))
