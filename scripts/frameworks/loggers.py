"""TensorBoard, W&B and MLflow, by the first rank alone: `mpirun -n 2 python scripts/frameworks/loggers.py`."""

import mlflow
import torch
import wandb
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import mpistrat as ms

GLOBAL_BATCH, EPOCHS = 48, 3


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy().enter_replica()
    torch.manual_seed(0)
    inputs = torch.randn(480, 16)
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model, loader = strategy.prepare(model, DataLoader(dataset, GLOBAL_BATCH, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy.is_first:
        writer = SummaryWriter("tensorboard")
        run = wandb.init(project="loggers", mode="offline")
        mlflow.start_run()

    for epoch in range(EPOCHS):
        losses = []
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        # Every rank takes part in the mean, and the first one logs it.
        mean = strategy.reduce(ms.ReduceOp.MEAN, torch.stack(losses).mean(), axis=None).item()
        strategy.print(f"epoch {epoch}: loss {mean!r}")
        if strategy.is_first:
            writer.add_scalar("loss", mean, epoch)
            run.log({"loss": mean})
            mlflow.log_metric("loss", mean, step=epoch)
    if strategy.is_first:
        writer.close()
        run.finish()
        mlflow.end_run()


if __name__ == "__main__":
    main()
