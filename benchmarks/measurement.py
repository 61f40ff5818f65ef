"""Comparing contestants in one run: interleaved rounds, medians, and a record of the machine."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ROUNDS = 9


def world() -> Any:
    """MPI's, which starts here: not where a worker process of a DataLoader imports the benchmark."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def compare(
    contestants: Mapping[str, Callable[[], object]], repeat: int, num_rounds: int = ROUNDS
) -> dict[str, float]:
    """Median microseconds per call; each round times `repeat` calls of each contestant in turn.

    Called by: every rank. A round's time is the slowest rank's.
    """
    comm = world()
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(max(2, repeat // 10)):
            call()
    for _ in range(num_rounds):
        for name, call in contestants.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            seconds = max(comm.allgather(time.perf_counter() - start))
            rounds[name].append(seconds / repeat * 1e6)
    return {name: statistics.median(times) for name, times in rounds.items()}


@contextlib.contextmanager
def gloo() -> Iterator[None]:
    """torch.distributed's default group over all ranks, its TCP store on a free port of this machine."""
    import torch.distributed as dist

    comm, port = world(), None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    port = comm.bcast(port)
    store = dist.TCPStore("127.0.0.1", port, comm.size, is_master=comm.rank == 0)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    from mpi4py import MPI

    with open("/proc/cpuinfo") as lines:
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": cores,
        **_gpus(),
        "ranks": world().size,
        "oversubscribed": cores < world().size,
        "mpi": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _gpus() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
    }


def report(title: str, rows: list[dict[str, Any]], path: str | None) -> None:
    """Print `rows` as a table on rank 0; with `path`, also write them with the machine as JSON."""
    if world().rank != 0:
        return
    columns = list(rows[0])
    cells = [columns] + [[_cell(row[column]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    where = machine()
    print(
        f"\n{title} · {where['ranks']} ranks · {where['mpi']} · {where['cpu']}, {where['cores']} cores"
    )
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if path:
        with open(path, "w") as file:
            json.dump({"title": title, "machine": where, "rows": rows}, file, indent=1)
            file.write("\n")


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
