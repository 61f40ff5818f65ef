"""Two ranks as on a TPU with one chip each, as far as the CPU device can show it: their graphs are read, and never run.

XLA has two CPU devices in each process, and each process uses one of them. A sum over both devices in one process is
recorded as a sum over two processes is. If it ran, it would wait for the other device, and XLA would end the process.
"""

import json
import sys
from typing import Any
from unittest import mock

import torch
import torch_xla
import torch_xla.runtime as torch_xla_runtime
from mpi4py import MPI
from torch import nn

import mpistrat as ms
from mpistrat import xla
from mpistrat.xla import transport

RANK = MPI.COMM_WORLD.rank
NATIVE: Any = torch_xla._XLAC
if RANK == 1:
    torch.ones(2, device="xla:0").tolist()  # a use of the device before the runtime's start
runtime = xla.start()
assert runtime.was_in_use == (RANK == 1)
if RANK == 0:
    torch_xla_runtime.world_size()  # torch_xla keeps this answer, which is 1
unconnected = [runtime.connect()]  # two devices of one process
runtime.num_devices, runtime.own_devices = 1, lambda: [RANK]  # type: ignore[method-assign]
transport.probe = lambda *_: [3.0, 1.0]  # the right sums


def all_reduces(tensors: list[torch.Tensor]) -> int:
    return NATIVE._get_xla_tensors_hlo(tensors).count(" all-reduce(")


sync_multi = NATIVE._xla_sync_multi
started: list[tuple[int, bool, bool]] = []


def start(
    tensors: list[torch.Tensor], devices: list[str], *, wait: bool, sync_xla_data: bool
) -> None:
    """In the place of torch_xla's `_xla_sync_multi`; what holds a sum gets another value, and is not run."""
    sums = all_reduces(tensors)
    started.append((sums, wait, sync_xla_data))
    if not sums:
        sync_multi(tensors, devices, wait=wait, sync_xla_data=sync_xla_data)
    for tensor in tensors if sums else ():
        tensor.copy_(torch.full(tensor.shape, 8.0).to("xla:0"))


strategy = ms.TPUStrategy(gradients="mean")
with strategy.scope():
    model = nn.Linear(3, 1)
batch = torch.ones(2, 3).to("xla:0")


def step(x: torch.Tensor) -> tuple[int, int]:
    loss = model(x).square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = ms.get_replica_context().all_reduce("sum", loss.detach())
    counts = all_reduces(gradients), all_reduces([total])
    for parameter in model.parameters():
        parameter.grad = None
    return counts


in_step = strategy.run(step, args=(batch,))
operand, other = batch + RANK, batch * 2
with mock.patch.object(NATIVE, "_xla_sync_multi", start):
    results = [strategy.reduce("mean", operand, axis=None) for _ in range(2)]
results.append(strategy.gather(batch * 3, axis=0))  # through the host
pending = runtime.are_pending([*results, other])
world = torch_xla_runtime.world_size()
torch_xla_runtime.use_spmd()
unconnected.append(runtime.connect())
answer = {
    "not connected": unconnected,
    "world": world,
    "by XLA": "by XLA's collectives" in strategy.extended.explain(),
    "all-reduces in the step, of gradients and of a value": in_step,
    "started: all-reduces, wait, sync_xla_data": started,
    "pending: three results, another tensor": pending,
}
sys.stdout.write(json.dumps(answer) + "\n")
