"""Tensor parallelism times FSDP2: `mpirun -n 2 mpistrat run scripts/torch_distributed/tensor_parallel.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

GLOBAL_BATCH, STEPS = 24, 10


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(16, 64)
        self.out_proj = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(torch.relu(self.in_proj(x)))


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    ranks = int(os.environ["WORLD_SIZE"])
    in_tensor = 2 if ranks % 2 == 0 else 1  # ranks that share a layer
    sizes, names = (ranks // in_tensor, in_tensor), ("data", "tensor")
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)  # and the default group

    torch.manual_seed(0)
    model: nn.Module = FeedForward().to(device.type)
    plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    model = parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    part, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    for step in range(STEPS):
        inputs = torch.randn(GLOBAL_BATCH, 16)  # the same on every rank
        x = inputs[part::parts].to(device.type)  # those of a "tensor" group read the same part
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / parts
        dist.all_reduce(mean, group=mesh.get_group("data"))
        if mesh.get_rank() == 0:
            print(f"step {step}: loss {mean:.8f}")
    full = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    if mesh.get_rank() == 0:
        print(f"parameters {sum(p.abs().sum().item() for p in full):.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
