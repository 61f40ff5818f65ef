"""torch.distributed on gloo, and DistributedDataParallel over it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpistrat.tools.bench.rounds import all_ranks, own_host
from mpistrat.tools.bench.work import Step, Work, step_of

SECONDS_TO_START = 120


def start() -> None:
    """Make the default group over all ranks. Its TCP store is on a free port of rank 0's machine."""
    if dist.is_initialized():
        return
    everyone = all_ranks()
    host = own_host()
    wait = datetime.timedelta(seconds=SECONDS_TO_START)
    store_at: Any = dist.TCPStore  # type: ignore[attr-defined]
    if everyone.rank == 0:
        store = store_at(host, 0, everyone.size, True, wait, wait_for_workers=False)
        everyone.broadcast_object((host, store.port))
    else:
        host, port = everyone.broadcast_object(None)
        store = store_at(host, port, everyone.size, False, wait)
    dist.init_process_group(
        "gloo", store=store, rank=everyone.rank, world_size=everyone.size, timeout=wait
    )


def training_steps(work: Work) -> dict[str, Step]:
    start()
    module, _ = work.build()
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    return {"DDP, gloo": step_of(work, wrapped, optimizer)}


def all_reduces(values: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    start()
    buffer = values.copy()
    tensor = torch.from_numpy(buffer)

    def over_itself() -> np.ndarray:
        dist.all_reduce(tensor)
        return buffer

    return {"gloo": over_itself}
