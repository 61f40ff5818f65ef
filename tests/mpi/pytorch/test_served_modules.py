"""Torch modules whose parameters are on servers. The last ranks serve, the others train."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms

pytestmark = pytest.mark.mpi(min_size=2)

COMM = MPI.COMM_WORLD
SERVERS = 1 if COMM.size < 4 else 2
WORKERS = COMM.size - SERVERS
CLUSTER = {
    "worker": [f"w{i}" for i in range(WORKERS)],
    "ps": [f"s{i}" for i in range(SERVERS)],
}
Strategy = ms.compat.v1.ParameterServerStrategy


def train(body: Callable[[Any, int], None], **options: Any) -> None:
    """Run `body(strategy, worker)` on the workers, while the other ranks serve."""
    if COMM.rank >= WORKERS:
        ms.Server(CLUSTER, "ps", COMM.rank - WORKERS).join()
        return
    resolver = ms.cluster_resolver.SimpleClusterResolver(
        ms.cluster_resolver.ClusterSpec(CLUSTER), task_type="worker", task_id=COMM.rank
    )
    strategy = Strategy(resolver, **options)
    try:
        body(strategy, COMM.rank)
    finally:
        strategy.extended.job.done()


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(10 * step + worker).normal(size=(4, 6))).float()


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def expected(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> torch.nn.Module:
    """One process that steps by the sum of the gradients of all workers' batches."""
    model = net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, batch(worker, step)) for worker in range(WORKERS)).backward()  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
    return model


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_synchronous_steps(name: str, split: bool) -> None:
    """Equal to one process; worker 0's values are everybody's; learning rates change."""

    def body(strategy: Any, worker: int) -> None:
        with strategy.scope():
            model = net(seed=worker)
            optimizer = MAKERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        for number in range(4):
            strategy.run(step, args=(batch(worker, number),))
            scheduler.step()
        strategy.run(lambda: None)  # pulls
        for got, wanted in zip(
            model.parameters(), expected(MAKERS[name], 4).parameters(), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)
        assert not optimizer.state

    partitioner = ms.experimental.partitioners.FixedShardsPartitioner(2) if split else None
    train(body, max_staleness=0, variable_partitioner=partitioner)
