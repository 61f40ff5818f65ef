"""Loaders that would read examples twice or never, and samplers without an end."""

import itertools

import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpistrat as ms

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
DATASET = TensorDataset(torch.arange(40))


@pytest.fixture(params=[1, 2], ids=["k=1", "k=2"], scope="module")
def strategy(request):
    devices = [f"cpu:{i}" for i in range(request.param)]
    return ms.MultiWorkerMirroredStrategy(devices=devices, deterministic=True)


def examples_of(strategy, distributed, steps=None):
    """What all replicas read, step after step."""
    read = []
    for (batch,) in itertools.islice(distributed, steps):
        read.append(strategy.gather(batch, axis=0).tolist())
    return read


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_loader_reads_every_example_once(strategy, workers):
    torch.manual_seed(RANK)  # the ranks' own shuffles differ
    loader = DataLoader(DATASET, batch_size=9, shuffle=True, num_workers=workers)
    distributed = strategy.experimental_distribute_dataset(loader)
    epochs = [[*itertools.chain(*examples_of(strategy, distributed))] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 2
    assert epochs[0] != epochs[1]


def test_a_step_without_examples_for_some_replicas(strategy):
    loader = DataLoader(DATASET, batch_sampler=[[7], [1, 2, 3, 4, 5, 6, 8, 9], [0]])
    distributed = strategy.experimental_distribute_dataset(loader)
    assert examples_of(strategy, distributed) == [[7], [1, 2, 3, 4, 5, 6, 8, 9], [0]]


def test_an_endless_sampler(strategy):
    endless = ([i % 40, (i + 1) % 40] for i in itertools.count(0, 2))
    loader = DataLoader(DATASET, batch_sampler=endless)
    distributed = strategy.experimental_distribute_dataset(loader)
    assert examples_of(strategy, distributed, steps=3) == [[0, 1], [2, 3], [4, 5]]


def test_a_sampler_does_not_put_the_ranks_generators_out_of_step(strategy):
    torch.manual_seed(3)
    loader = DataLoader(DATASET, batch_size=20, shuffle=True)
    for _ in strategy.experimental_distribute_dataset(loader):
        pass
    drawn = MPI.COMM_WORLD.allgather(torch.rand(1).item())
    assert len(set(drawn)) == 1


def test_a_distributed_sampler_is_refused(strategy):
    sampler = DistributedSampler(DATASET, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="DistributedSampler"):
        list(strategy.experimental_distribute_dataset(DataLoader(DATASET, 4, sampler=sampler)))


@pytest.mark.mpi(min_size=2)
def test_iterables_that_differ_between_ranks_are_refused(strategy):
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(RANK)).split(8)
    with pytest.raises(ValueError, match="twice"):
        list(strategy.experimental_distribute_dataset([(part,) for part in shuffled]))
