"""Healthy training whose ranks are slow in turn: `slow_training.py SECONDS FOLDER`, on every rank.

Now and then a rank takes up to three quarters of MPISTRAT_STALL_SECONDS longer than the others for its step, and rank 0
evaluates and saves alone while the others wait.
"""

import os
import random
import sys
import time
from pathlib import Path

import torch

import mpistrat as ms

SECONDS, FOLDER = float(sys.argv[1]), Path(sys.argv[2])
LONGEST = 0.75 * float(os.environ["MPISTRAT_STALL_SECONDS"])
STEPS_BETWEEN_PAUSES, STEPS_BETWEEN_SAVES = 7, 31

strategy = ms.MultiWorkerMirroredStrategy()
topology = strategy.cluster_resolver.topology()
chosen = random.Random("the same on all ranks")
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step() -> torch.Tensor:
    x, y = torch.randn(16, 64), torch.randint(10, (16,))
    losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    loss = ms.compute_average_loss(losses, global_batch_size=16 * topology.size)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def busy_until(end: float) -> None:
    while time.monotonic() < end:
        sum(range(1000))


steps = 0
started = time.monotonic()
while strategy.reduce("sum", float(time.monotonic() - started > SECONDS), axis=None) == 0:
    steps += 1
    evaluates = steps % STEPS_BETWEEN_SAVES == 0
    if steps % STEPS_BETWEEN_PAUSES == 0 and not evaluates:
        slow, pause = chosen.randrange(topology.size), chosen.uniform(0, LONGEST)
        if slow == topology.rank:
            if chosen.random() < 0.5:
                time.sleep(pause)
            else:
                busy_until(time.monotonic() + pause)
        else:
            chosen.random()
    if evaluates and topology.rank == 0:
        torch.save(model.state_dict(), FOLDER / "model.pt")
        time.sleep(LONGEST)
    loss = strategy.reduce("sum", strategy.run(step), axis=None)
print(f"rank {topology.rank} made {steps} steps, loss {float(loss):.3f}\n", end="", flush=True)
