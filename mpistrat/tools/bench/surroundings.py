"""The machine and the software of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
from typing import Any

import numpy as np

from mpistrat.communicators import Communicator
from mpistrat.machine.cpu_model import cpu_model
from mpistrat.machine.devices import num_accelerators, torch_accelerator
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.rounds import distance_before, distance_now
from mpistrat.tools.doctor.software import version_of


def surroundings(communicator: Communicator, device: Device = HOST) -> dict[str, Any]:
    """Return the machine and the software of a measurement, as a dict for the report. Its texts are rank 0's.

    Collective; the same on all ranks. "distance_us" has two numbers, before and after the benchmark: the microseconds
    that two ranks of a node take to hand each other 128 KB, the slowest of all. "usable_cores" counts the cores of all
    hosts that any rank may use.

    Args: device: the device with the measured memory.
    """
    cores = sorted(os.sched_getaffinity(0))
    distances = distance_before(), distance_now()
    of_ranks = communicator.all_gather_object((socket.gethostname(), cores, distances))
    mpi = sys.modules.get("mpi4py.MPI")
    usable = len({(host, cpu) for host, cpus, _ in of_ranks for cpu in cpus})
    here = {
        "tool": f"mpistrat {version_of('mpistrat') or '(not installed)'}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores_of_rank_0": len(cores),
        "ranks": communicator.size,
        "hosts": sorted({host for host, *_ in of_ranks}),
        "usable_cores": usable,
        "oversubscribed": usable < communicator.size,
        "distance_us": (1e6 * np.max([between for *_, between in of_ranks], axis=0)).tolist(),
        "mpi": _first_line(mpi.Get_library_version()) if mpi else "no MPI",
        "device": str(device),
        **_torch(),
        "ways": communicator.explain().split("\n"),
    }
    return communicator.broadcast_object(here)


def _first_line(text: str) -> str:
    """Return the first line of `text` up to a comma, with single spaces."""
    return " ".join(text.split("\n")[0].split(",")[0].strip("\0 ").split())


def _torch() -> dict[str, Any]:
    """Return torch's version, threads per rank and accelerators by report key; an empty dict if torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    kind = torch_accelerator()
    gpus = [str(Device(f"{kind}:{i}")) for i in range(num_accelerators())] if kind else []
    return {"torch": torch.__version__, "threads_per_rank": torch.get_num_threads(), "gpus": gpus}
