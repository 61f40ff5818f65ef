"""Train from the newest checkpoint on. Rank 0 prints a line of JSON for each step and each checkpoint.

Rank 1 kills itself after the step that the variable KILLED_AT names.
"""

import json
import os
import signal

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver

RANK = MPIClusterResolver().topology().rank
STEPS, EVERY = 60, 10


def tell(**line: object) -> None:
    if RANK == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    torch.manual_seed(0)
    x = torch.randn(4800, 20)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).long())
    loader = DataLoader(data, batch_size=240, shuffle=True)
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        done = ms.Variable(0)

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        losses = cross_entropy(model(x), y, reduction="none")
        loss = ms.compute_average_loss(losses, global_batch_size=240)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = strategy.experimental_distribute_dataset(loader)
    checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer, data=batches, done=done)
    manager = ms.checkpoint.CheckpointManager(checkpoint, "checkpoints")
    manager.restore_or_initialize()
    number = int(done)
    tell(begins=number, ranks=strategy.num_replicas_in_sync)
    while number < STEPS:
        for batch in batches:
            loss = strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)
            number += 1
            done.assign(number)
            tell(step=number, loss=round(float(loss), 4))
            if number == int(os.environ.get("KILLED_AT", 0)) and RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if number % EVERY == 0:
                manager.save(number)
                tell(saved=number)
            if number == STEPS:
                break


if __name__ == "__main__":
    main()
