"""Horovod, if it is installed with torch and the job's MPI."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from mpistrat.tools.bench.rounds import CannotTakePart, Contestants, all_ranks, check_on_host
from mpistrat.tools.bench.work import Work, step_of


def _start() -> None:
    ranks = all_ranks().size
    hvd.init()
    if hvd.size() != ranks:
        raise CannotTakePart(f"sees {hvd.size()} of {ranks} ranks: built without this MPI")


def training_steps(work: Work) -> Contestants:
    check_on_host(work.device)
    _start()
    module, optimizer = work.build()
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters())
    return {"Horovod": step_of(work, module, wrapped)}


def all_reduces(values: np.ndarray) -> Contestants:
    check_on_host(getattr(values, "device", "cpu"))
    _start()
    buffer = values.copy()
    tensor = torch.from_numpy(buffer)

    def over_itself() -> np.ndarray:
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"of {values.nbytes} bytes")
        return buffer

    return {"Horovod": over_itself}
