"""Train for six steps. In the fourth, rank 1 comes late."""

import time

import torch
from torch.nn.functional import mse_loss

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver

STEPS, LATE = 6, 3


def main() -> None:
    rank = MPIClusterResolver().topology().rank
    torch.manual_seed(0)
    x = torch.randn(STEPS * 768, 256)
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.replica():
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = strategy.prepare(model, optimizer)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=768)
        loader = strategy.prepare(loader)
        for step, (part,) in enumerate(loader):
            if rank == 1 and step == LATE:
                time.sleep(0.3)
            optimizer.zero_grad()
            mse_loss(model(part), part[:, :1]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
