"""FSDP2, with clipped gradients: `mpirun -n 2 mpistrat run scripts/torch_distributed/fsdp2.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

GLOBAL_BATCH, STEPS, WORDS, LENGTH = 12, 10, 50, 16


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same parameters on every rank, before they are sharded
    layers = [
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
    ]
    model = nn.Sequential(nn.Embedding(WORDS, 32), *layers, nn.Linear(32, WORDS)).to(device)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for step in range(STEPS):
        start = torch.randint(WORDS, (GLOBAL_BATCH, 1))  # the same on every rank
        texts = ((start + 3 * torch.arange(LENGTH + 1)) % WORDS)[rank::size].to(device)
        logits = model(texts[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean:.8f} norm {norm:.8f}")
    # Each rank has its shards; full_tensor() gathers.
    full = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    if rank == 0:
        print(f"parameters {sum(p.abs().sum().item() for p in full):.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
