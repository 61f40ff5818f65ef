"""torch.distributed on its own backend (gloo, NCCL, …), and DistributedDataParallel and FSDP2 over it."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.tools.bench import torch_groups
from mpistrat.tools.bench.torch_groups import backend_of_torch, group_on
from mpistrat.tools.bench.work import Step, Work


def training_steps(work: Work) -> dict[str, Step]:
    return torch_groups.training_steps(work, backend_of_torch(work.device))


def all_reduces(values: Array) -> dict[str, Callable[[], Array]]:
    buffer = arrays.copy(values)
    tensor = arrays.as_tensor(buffer)
    backend = backend_of_torch(str(tensor.device))
    group = group_on(backend)

    def over_itself() -> Array:
        dist.all_reduce(tensor, group=group)
        return buffer

    return {backend: over_itself}
