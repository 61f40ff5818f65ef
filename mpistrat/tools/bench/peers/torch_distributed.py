"""torch.distributed on its own backend (gloo, NCCL, …) or on mpistrat; DistributedDataParallel and FSDP2 over it."""

from __future__ import annotations

import functools
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.machine.devices import seen_accelerators
from mpistrat.tools.bench.rounds import CannotTakePart, Contestants, all_ranks
from mpistrat.tools.bench.work import Step, Work, step_of
from mpistrat.torch_distributed.default_group import make_default_group

GLOO = "gloo"
MPISTRAT = "mpistrat"


@functools.cache
def group_on(backend: str) -> dist.ProcessGroup:
    """Return torch's process group of all ranks on `backend`. The first call for a backend makes it. Collective.

    It also makes torch's default group, on mpistrat's backend, if there is none.
    """
    if not dist.is_initialized():
        make_default_group()
    group: Any = dist.new_group(backend=backend)  # by its type it may be no group, since torch 2.14
    return group


def backend_of_torch(device: str) -> str:
    """Return torch's own backend for tensors on `device`: "gloo", "nccl", …. Called by: every rank.

    Raises: CannotTakePart on all ranks, if torch has no such backend, or if ranks share a device (NCCL refuses that).
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return GLOO
    name = f"{socket.gethostname()} {seen_accelerators()[int(number)]}"
    names = all_ranks().all_gather_object(name)
    if len(set(names)) < len(names):
        from mpistrat.communicators.transports.accelerator.gpu_transports import Gpu, shared_gpu

        if reason := shared_gpu([Gpu(0, name) for name in names]):
            raise CannotTakePart(f"{reason}, which its backend refuses")
    try:
        return dist.get_default_backend_for_device(kind)
    except ValueError:
        raise CannotTakePart(f"this torch has no backend for {kind}") from None


def training_steps(work: Work, backend: str = "") -> Contestants:
    """Return a step of DistributedDataParallel and one of FSDP2: "DDP, gloo" and "FSDP2, gloo". Called by: every rank.

    Args: backend: "" for torch's own backend on the work's device, or "mpistrat".
    Raises: CannotTakePart on all ranks, if `backend` is "" and `backend_of_torch` finds none.
    """
    backend = backend or backend_of_torch(work.device)
    return {f"DDP, {backend}": _ddp(work, backend), f"FSDP2, {backend}": _fsdp2(work, backend)}


def _ddp(work: Work, backend: str) -> Step:
    module, _ = work.build()
    wrapped = DistributedDataParallel(
        module, process_group=group_on(backend), gradient_as_bucket_view=True
    )
    return step_of(work, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01))


def _fsdp2(work: Work, backend: str) -> Step:
    """Return a step of a module that FSDP2 shards: each child that has parameters as a unit, then the rest."""
    module, _ = work.build()
    mesh = DeviceMesh.from_group(group_on(backend), torch.device(work.device).type)
    for child in module.children():
        if list(child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return step_of(work, module, torch.optim.SGD(module.parameters(), lr=0.01))


def all_reduces(values: Array) -> Contestants:
    buffer = arrays.copy(values)
    tensor = arrays.as_tensor(buffer)
    backend = backend_of_torch(str(tensor.device))
    group = group_on(backend)

    def over_itself() -> Array:
        dist.all_reduce(tensor, group=group)
        return buffer

    return {backend: over_itself}
