"""Lightning Fabric inside a replica: `mpirun -n 2 python scripts/frameworks/fabric_loop.py`."""

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms

GLOBAL_BATCH, EPOCHS = 48, 3


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    # One process of its own, whatever Slurm and MPI say.
    fabric = lightning.Fabric(devices=1, plugins=LightningEnvironment())
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    inputs = torch.randn(490, 16)  # the last batch is a short one
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    network, loader = strategy.prepare(network, DataLoader(dataset, GLOBAL_BATCH, shuffle=True))
    model, optimizer = fabric.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-2))

    for epoch in range(EPOCHS):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(loss.detach() * len(x))
        total = strategy.reduce(ms.ReduceOp.SUM, torch.stack(losses).sum(), axis=None)
        strategy.print(f"epoch {epoch}: loss {total / len(dataset):.8f} norm {norm:.8f}")
    strategy.print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
