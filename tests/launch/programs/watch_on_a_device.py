"""A weight on an accelerator that one rank changes: the watch names the steps between which that began.

The accelerator is that of `support.accelerator`.
"""

import sys
from pathlib import Path

import torch
from mpi4py import MPI

import mpistrat as ms

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import accelerator

accelerator.load()
RANK = MPI.COMM_WORLD.rank
strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
inputs = torch.ones(8, 64).to(model[0].weight.device)


def step() -> None:
    optimizer.zero_grad()
    model(inputs + RANK).square().mean().backward()
    optimizer.step()


for number in range(20):
    strategy.run(step)
    if number == 9 and RANK == 1:
        with torch.no_grad():
            model[0].weight += 1
