"""Lightning Fabric: `mpirun -n 2 mpistrat run scripts/torch_distributed/lightning_fabric.py`."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, EPOCHS = 48, 3


def main() -> None:
    # What torchrun sets. Without it there is one process.
    fabric = lightning.Fabric(
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    inputs = torch.randn(480, 16)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    # Fabric puts a DistributedSampler in: the batch size is one rank's.
    loader = DataLoader(dataset, GLOBAL_BATCH // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    for epoch in range(EPOCHS):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")
        if fabric.is_global_zero:  # fabric.print() writes on every node
            print(f"epoch {epoch}: loss {mean:.8f}")
    if fabric.is_global_zero:
        print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
