"""Trains the same models with the same replicas on ever fewer ranks, and prints a hash of what came out of each.

Arguments: how many replicas, then each number of ranks. With fewer ranks than were started, the first ones train.
"""

import hashlib
import os
import sys
import time

import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators.transports.hierarchical import HierarchicalTransport
from mpistrat.communicators.transports.pipelined import PipelinedTransport

WORLD = MPI.COMM_WORLD
EXAMPLES = 8  # of a replica, in a step


def mlp() -> torch.nn.Module:
    """Gradients of 340 kB: the ways for large messages are taken."""
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.BatchNorm1d(256),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(256, 256),
        torch.nn.Tanh(),
        torch.nn.Linear(256, 10),
    )


class Small(torch.nn.Module):
    """Of several dtypes, with sparse gradients, and statistics of all replicas together."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(50, 6, sparse=True)
        self.norm = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(70))
        self.short = torch.nn.Linear(70, 9).to(torch.bfloat16)
        self.out = torch.nn.Linear(9, 10).to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows((x[:, 0] * 10).long() % 50)
        x = self.norm(torch.cat([x, rows], dim=1))
        return self.out(self.short(x.bfloat16()).double())


def train(strategy: ms.Strategy, make, steps: int, replicas: int) -> str:
    torch.manual_seed(0)
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * replicas * EXAMPLES, 64, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    seeded = set()

    def step(batch):
        context = ms.get_replica_context()
        replica = context.replica_id_in_sync_group
        if replica not in seeded:  # each replica drops out numbers of its own
            seeded.add(replica)
            torch.manual_seed(100 + replica)
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), context.all_reduce("mean", loss.detach())

    losses = []
    data = ms.input.BatchedDataset((x, y), replicas * EXAMPLES)
    for batch in strategy.experimental_distribute_dataset(data):
        mine, mean = strategy.run(step, args=(batch,))
        losses.append(strategy.reduce("mean", mine, axis=None))
        assert losses[-1] == strategy.experimental_local_results(mean)[0]
    assert len(losses) == steps
    hashed = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *losses]:
        hashed.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def way(strategy: ms.Strategy) -> str:
    communicator = strategy.extended.communicator
    if communicator.size == 1:
        return "alone"
    if isinstance(communicator.transports.preferred[0], HierarchicalTransport):
        first, *_ = communicator.explain().split("\n")
        return "by-node" if "an all-reduce takes" in first else "flat"
    if any(
        isinstance(transport, PipelinedTransport) for transport in communicator.transports.preferred
    ):
        # There is one rank per node.
        return "flat"
    return "flat" if "without shared memory" in strategy.extended.explain() else "window"


def run(ranks: int, replicas: int) -> None:
    comm = WORLD.Split(0 if WORLD.rank < ranks else MPI.UNDEFINED, WORLD.rank)
    if comm != MPI.COMM_NULL:
        strategy = ms.MultiWorkerMirroredStrategy(
            comm=comm,
            devices=[f"cpu:{i}" for i in range(replicas // ranks)],
            gradients="mean",
            deterministic=True,
        )
        communicator = strategy.extended.communicator
        first = communicator.transports.preferred[0] if ranks > 1 else None
        if isinstance(first, HierarchicalTransport):
            communicator.all_reduce(torch.zeros(1 << 16))  # measures, once
            first.smallest = 0  # what is large goes by node, whatever that costs here
        hashes = [train(strategy, mlp, 20, replicas), train(strategy, Small, 8, replicas)]
        if WORLD.rank == 0:
            print("trained", replicas, ranks, way(strategy), *hashes, flush=True)
    ended = WORLD.Ibarrier()
    while not ended.Test():  # asleep: there are fewer cores than ranks
        time.sleep(0.005)


if __name__ == "__main__":
    replicas, *numbers = map(int, sys.argv[1:])
    for ranks in numbers:
        run(ranks, replicas)
        if ranks > 1:
            os.environ["MPISTRAT_SHARED_MB"] = "0"
            run(ranks, replicas)
            del os.environ["MPISTRAT_SHARED_MB"]
