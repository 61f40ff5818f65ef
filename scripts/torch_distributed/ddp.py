"""DistributedDataParallel, with DistributedSampler: `mpirun -n 2 mpistrat run scripts/torch_distributed/ddp.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 48, 3
Batch = tuple[torch.Tensor, ...]


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    dist.init_process_group(dist.get_default_backend_for_device(device))

    torch.manual_seed(0)
    inputs = torch.randn(480, 16)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    sampler: DistributedSampler[Batch] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    total = torch.zeros((), device=device)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total.zero_()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader) / dist.get_world_size():.8f}")
    if dist.get_rank() == 0:
        print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
