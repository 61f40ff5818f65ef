"""Hugging Face's accelerate inside a replica: `mpirun -n 2 python scripts/frameworks/accelerate_loop.py`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms

GLOBAL_BATCH, EPOCHS, ACCUMULATED = 24, 3, 2


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    set_seed(0)
    inputs = torch.randn(580, 16)
    targets = inputs[:, :4].argmax(dim=1)
    train = TensorDataset(inputs[:480], targets[:480])
    held_out = TensorDataset(inputs[480:], targets[480:])
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    network, loader, test_loader = strategy.prepare(
        network, DataLoader(train, GLOBAL_BATCH, shuffle=True), DataLoader(held_out, GLOBAL_BATCH)
    )
    # accelerate prepares no loader: it would read one batch ahead.
    model, optimizer = accelerator.prepare(
        network, torch.optim.AdamW(network.parameters(), lr=1e-2)
    )

    for epoch in range(EPOCHS):
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = strategy.reduce(ms.ReduceOp.MEAN, torch.stack(losses).mean(), axis=None)
        strategy.print(f"epoch {epoch}: loss {mean:.8f}")
    right, seen = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            right, seen = right + (model(x).argmax(dim=1) == y).sum(), seen + len(y)
    right, seen = strategy.reduce(ms.ReduceOp.SUM, [right, seen], axis=None)
    strategy.print(f"accuracy {right / seen:.8f} of {seen:.0f}")
    strategy.print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    main()
