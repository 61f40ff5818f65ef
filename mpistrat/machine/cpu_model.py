"""The model of this processor."""

from __future__ import annotations

import contextlib
import platform


def cpu_model() -> str:
    """Return the processor's model from /proc/cpuinfo, "AMD EPYC 9654 96-Core Processor", else its architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
