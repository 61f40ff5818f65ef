"""n ranks that share a global batch follow one rank that has all of it: the same loss curve on real data."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import mpistrat as ms

BATCH, EPOCHS, SCANS = 64, 3, 960


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def loader() -> torch.utils.data.DataLoader[Any]:
    digits = load_digits()
    images = torch.tensor(digits.images[:SCANS], dtype=torch.float32).div(16).unsqueeze(1)
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target[:SCANS]))
    order = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader(data, BATCH, shuffle=True, generator=order)


def loss_curve(strategy: ms.Strategy) -> list[float]:
    torch.manual_seed(0)
    with strategy.scope():
        model = small_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(batch: Any) -> torch.Tensor:
        images, labels = batch
        losses = functional.cross_entropy(model(images), labels, reduction="none")
        loss = ms.compute_average_loss(losses, global_batch_size=BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    batches = strategy.experimental_distribute_dataset(loader())
    for _ in range(EPOCHS):
        for batch in batches:
            loss = strategy.reduce(ms.ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("replicas_per_rank", [1, 2])
def test_two_ranks_follow_one(replicas_per_rank: int) -> None:
    torch.set_num_threads(1)
    devices = [f"cpu:{i}" for i in range(replicas_per_rank)]
    alone = loss_curve(ms.OneDeviceStrategy("cpu:0"))
    together = loss_curve(ms.MultiWorkerMirroredStrategy(devices=devices))
    assert len(alone) == EPOCHS * SCANS // BATCH
    assert alone[-1] < 0.4 * alone[0]
    # Rounding differences of 6e-8 grow a little over 45 steps of momentum.
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=2e-4, atol=2e-5)
