"""Loaders that would read examples twice or never, and samplers without an end."""

import itertools

import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpistrat as ms
from support.rank_errors import assert_usable, errors_of_ranks

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


def numbers(length):
    return TensorDataset(torch.arange(length))


OTHER_LENGTH = 20 + 3 * (RANK == SIZE - 1)  # of the last rank
MAP_STYLE = {
    "in order": lambda data: DataLoader(data, 4),
    "shuffled": lambda data: DataLoader(data, 4, shuffle=True),
    "worker": lambda data: DataLoader(data, 4, num_workers=1, multiprocessing_context="fork"),
    "sampler": lambda data: DataLoader(data, 4, sampler=[*range(20)]),
}


def assert_lengths_are_told(errors, words):
    assert {name for name, _, _ in errors} == {"ValueError"}
    first = "rank 0" if SIZE == 2 else f"ranks 0-{SIZE - 2}"
    for _, text, _ in errors:
        assert f"({first}: 20 {words}; rank {SIZE - 1}: 23 {words})" in text
        assert "local_batches=True" in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", MAP_STYLE)
def test_map_style_datasets_of_different_lengths(strategy, case):
    loader = MAP_STYLE[case](numbers(OTHER_LENGTH))
    distributed = strategy.experimental_distribute_dataset(loader)
    assert_lengths_are_told(errors_of_ranks(lambda: list(distributed)), "examples")
    assert_usable(strategy)


class Growing(torch.utils.data.Dataset):
    """Its length changes from one epoch to the next."""

    length = 20

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return (torch.tensor(index),)


@pytest.mark.mpi(min_size=2)
def test_a_dataset_that_grows_on_one_rank(strategy):
    growing = Growing()
    distributed = strategy.experimental_distribute_dataset(DataLoader(growing, 4))
    assert len(examples_of(strategy, distributed)) == 5
    growing.length = OTHER_LENGTH
    assert_lengths_are_told(errors_of_ranks(lambda: list(distributed)), "examples")
    growing.length = 23
    assert len(examples_of(strategy, distributed)) == 6


class NoLength(Growing):
    def __len__(self):
        raise NotImplementedError


def test_a_dataset_that_does_not_know_its_length(strategy):
    loader = DataLoader(NoLength(), batch_sampler=[[0, 1, 2], [3, 4]])
    distributed = strategy.experimental_distribute_dataset(loader)
    assert examples_of(strategy, distributed) == [[0, 1, 2], [3, 4]]


def test_ranks_with_data_of_their_own(strategy):
    """Each may have as much as it likes: nothing is to be equal."""
    own = numbers(OTHER_LENGTH)
    off = ms.InputOptions(experimental_auto_shard_policy="OFF")
    for distributed in (
        strategy.prepare(DataLoader(own, 4), local_batches=True),
        strategy.experimental_distribute_dataset(DataLoader(own, 4), off),
        strategy.distribute_datasets_from_function(lambda context: DataLoader(own, 4)),
    ):
        assert list(distributed)
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
def test_iterables_of_different_lengths(strategy):
    batches = [(torch.arange(8),)] * OTHER_LENGTH
    distributed = strategy.experimental_distribute_dataset(batches)
    assert_lengths_are_told(errors_of_ranks(lambda: list(distributed)), "batches")
    assert_usable(strategy)


def of_generator():
    return ((torch.arange(8),) for _ in range(OTHER_LENGTH))


def of_file(path):
    return ((torch.tensor(i),) for i in range(OTHER_LENGTH))


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
@pytest.mark.parametrize(
    "make",
    [of_generator, lambda: ms.input.FileDataset(["a node's own"], of_file, 1)],
    ids=["generator", "file"],
)
def test_data_whose_end_no_rank_knows_before(strategy, make):
    """An evaluation, in which ranks do not meet, would leave out what the last rank alone has."""
    data = ms.InputOptions(experimental_auto_shard_policy="DATA")
    errors = errors_of_ranks(lambda: list(strategy.experimental_distribute_dataset(make(), data)))
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}
    for length in (20, 23):
        assert all(f"end of the dataset after {length} steps" in text for _, text, _ in errors)
