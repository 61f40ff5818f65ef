"""Torch models that all workers train, with their parameters on servers: the last ranks serve, the others train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import mpistrat as ms

COMM = MPI.COMM_WORLD
SERVERS = 1 if COMM.size < 4 else 2
WORKERS = COMM.size - SERVERS
COMM_OF_WORKERS = COMM.Split(0 if COMM.rank < WORKERS else 1)
CLUSTER = {
    "worker": [f"w{i}" for i in range(WORKERS)],
    "ps": [f"s{i}" for i in range(SERVERS)],
}


def train(body: Callable[[Any, int], None], **options: Any) -> None:
    """Run `body(strategy, worker)` on the workers, while the other ranks serve."""
    if COMM.rank >= WORKERS:
        ms.Server(CLUSTER, "ps", COMM.rank - WORKERS).join()
        return
    resolver = ms.cluster_resolver.SimpleClusterResolver(
        ms.cluster_resolver.ClusterSpec(CLUSTER), task_type="worker", task_id=COMM.rank
    )
    strategy: Any = ms.compat.v1.ParameterServerStrategy(resolver, **options)
    try:
        body(strategy, COMM.rank)
    finally:
        strategy.extended.job.done()


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    hidden = torch.nn.Linear(6, 5)
    output = torch.nn.Linear(5, 3)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), output)


def batch(worker: int, step: int) -> torch.Tensor:
    numbers = np.random.default_rng(10 * step + worker)
    return torch.from_numpy(numbers.normal(size=(4, 6))).float()


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum()


Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def one_weight(strategy: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A weight, at first 0, and a step by a gradient of 1."""
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    return model, optimizer, step
