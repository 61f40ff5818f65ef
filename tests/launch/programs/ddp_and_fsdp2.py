"""DDP, FSDP2 and other calls of torch.distributed on an accelerator, as a program for torchrun has them.

Run by `mpistrat run`. The accelerator is that of `support.accelerator`. Rank 0 prints "done NAME" for each case.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import accelerator

SIM = accelerator.load()
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
dist.init_process_group("nccl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
STEPS = 5
TOLERANCE = 1e-5


def on_device(values: torch.Tensor) -> torch.Tensor:
    return values.to(accelerator.KIND)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def train(wrap) -> None:
    """As one process that takes the examples of all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(accelerator.KIND)
    alone = copy.deepcopy(model)
    wrapped = wrap(model)
    examples = on_device(torch.randn(8 * SIZE, 64))
    trainings = [
        (module, torch.optim.AdamW(module.parameters(), 1e-2), part)
        for module, part in ((wrapped, examples.chunk(SIZE)[RANK]), (alone, examples))
    ]
    for _ in range(STEPS):
        for module, optimizer, part in trainings:
            optimizer.zero_grad()
            module(part).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        sharded = isinstance(ours, DTensor)
        mine = ours.to_local() if sharded else ours
        part = expected.chunk(SIZE)[RANK] if sharded else expected
        torch.testing.assert_close(mine, part, rtol=TOLERANCE, atol=TOLERANCE)
    done(wrap.__name__)


def calls() -> None:
    """Of tensors on the device, on the host, and of objects."""
    mine = on_device(torch.full((6,), float(RANK)))
    parts = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(parts, mine)
    assert [part[0].item() for part in parts] == list(range(SIZE))
    scattered = on_device(torch.empty(4))
    dist.reduce_scatter_tensor(scattered, on_device(torch.ones(4 * SIZE) * (RANK + 1)))
    assert scattered.tolist() == [sum(range(SIZE + 1))] * 4
    received = on_device(torch.empty(SIZE))
    dist.all_to_all_single(received, on_device(torch.arange(SIZE) + 10.0 * RANK))
    assert received.tolist() == [RANK + 10.0 * rank for rank in range(SIZE)]
    on_host, objects = torch.ones(3), [None] * SIZE
    dist.all_reduce(on_host)
    assert on_host.tolist() == [SIZE] * 3
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(SIZE)]
    if RANK < 2 <= SIZE:
        if RANK == 0:
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
            assert mine.tolist() == [0.0] * 6
    dist.barrier()
    done("calls")


def done(name: str) -> None:
    # FSDP2 frees memory of its own streams without record_stream: these streams wait before they use it again.
    violations = [text for text in SIM.violations() if "record_stream" not in text]
    assert not violations, violations[:3]
    if RANK == 0:
        print("done", name, flush=True)


train(ddp)
train(fsdp2)
calls()
dist.destroy_process_group()
