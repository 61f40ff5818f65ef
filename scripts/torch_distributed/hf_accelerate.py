"""Hugging Face's accelerate: `mpirun -n 2 mpistrat run scripts/torch_distributed/hf_accelerate.py`."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, EPOCHS = 48, 3


def main() -> None:
    # A seedable sampler: the order of the examples does not depend on the number of ranks.
    options = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=options)
    set_seed(0)
    inputs = torch.randn(580, 16)
    targets = inputs[:, :4].argmax(dim=1)
    train = TensorDataset(inputs[:480], targets[:480])
    held_out = TensorDataset(inputs[480:], targets[480:])  # 100: not a multiple of the batch
    # accelerate deals batches out: the batch size is one rank's.
    batch_size = GLOBAL_BATCH // accelerator.num_processes
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer, loader, test_loader = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=1e-2),
        DataLoader(train, batch_size, shuffle=True),
        DataLoader(held_out, batch_size),
    )

    for epoch in range(EPOCHS):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean:.8f}")
    right, seen = 0, 0
    with torch.no_grad():
        for x, y in test_loader:
            # Without the examples that fill up the last batches.
            guesses, labels = accelerator.gather_for_metrics((model(x).argmax(dim=1), y))
            right, seen = right + int((guesses == labels).sum()), seen + len(labels)
    accelerator.print(f"accuracy {right / seen:.8f} of {seen}")
    accelerator.print(f"parameters {sum(p.abs().sum().item() for p in model.parameters()):.8f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
