"""What a measurement was taken on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import socket
from typing import Any

import numpy as np

from mpistrat.cluster_resolver.cpu_model import cpu_model
from mpistrat.communicators import Communicator


def surroundings(communicator: Communicator) -> dict[str, Any]:
    """Collective; equal on all ranks."""
    cores = len(os.sched_getaffinity(0))
    mine = (socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
    everyone = communicator.all_gather_object(mine)
    usable = len({(host, cpu) for host, cpus in everyone for cpu in cpus})
    here = {
        "tool": f"mpistrat {_version()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores_of_rank_0": cores,
        "ranks": communicator.size,
        "hosts": sorted({host for host, _ in everyone}),
        "usable_cores": usable,
        "oversubscribed": usable < communicator.size,
        "ways": communicator.explain().split("\n"),
    }
    told: dict[str, Any] = communicator.broadcast_object(here)
    return told


def _version() -> str:
    try:
        return importlib.metadata.version("mpistrat")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
