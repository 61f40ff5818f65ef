"""torch.distributed on gloo, and DistributedDataParallel and FSDP2 over it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from mpistrat.tools.bench import torch_groups
from mpistrat.tools.bench.torch_groups import GLOO, group_on
from mpistrat.tools.bench.work import Step, Work


def training_steps(work: Work) -> dict[str, Step]:
    return torch_groups.training_steps(work, GLOO)


def all_reduces(values: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    group = group_on(GLOO)
    buffer = values.copy()
    tensor = torch.from_numpy(buffer)

    def over_itself() -> np.ndarray:
        dist.all_reduce(tensor, group=group)
        return buffer

    return {"gloo": over_itself}
