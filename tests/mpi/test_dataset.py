"""Distributed datasets over ranks: every example of a global batch goes to exactly one replica."""

import itertools

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mpistrat as ms
from mpistrat.input.splitting import slice_bounds
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture(scope="module", params=[1, 2], ids=["k=1", "k=2"])
def strategy(request):
    devices = [f"cpu:{i}" for i in range(request.param)]
    return ms.MultiWorkerMirroredStrategy(devices=devices, deterministic=True)


def steps_of_replicas(strategy, dataset):
    """For each step the examples of each replica, of all ranks, in replica order."""
    mine = [
        [np.asarray(part).reshape(-1).tolist() for part in strategy.experimental_local_results(x)]
        for x in dataset
    ]
    ranks = WORLD.allgather(mine)
    assert len({len(steps) for steps in ranks}) == 1
    return [joined(step) for step in zip(*ranks, strict=True)]


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def pieces(batch, n):
    bounds = [slice_bounds(len(batch), i, n) for i in range(n)]
    return [batch[first:end] for first, end in bounds]


def test_arrays_are_cut_into_consecutive_pieces(strategy):
    n = strategy.num_replicas_in_sync
    batches = [np.arange(8.0), np.arange(8.0, 15.0), np.arange(1.0)]  # the last ones are short
    distributed = strategy.experimental_distribute_dataset(batches)
    expected = [pieces(batch.tolist(), n) for batch in batches]
    for _ in range(2):  # each iteration is an epoch
        assert steps_of_replicas(strategy, distributed) == expected
    assert [joined(step) for step in expected] == [batch.tolist() for batch in batches]


def test_a_structure_is_cut_leaf_by_leaf(strategy):
    batch = {"x": torch.arange(12).reshape(6, 2), "y": (np.arange(6),)}
    n = strategy.num_replicas_in_sync
    for step in strategy.experimental_distribute_dataset([batch]):
        sums = strategy.run(lambda b: (b["x"].sum(), b["y"][0].sum()), args=(step,))
        assert int(strategy.reduce("sum", sums[0], axis=None)) == 66
        assert int(strategy.reduce("sum", sums[1], axis=None)) == 15
        rows = strategy.gather(strategy.run(lambda b: b["x"], args=(step,)), axis=0)
        assert rows.tolist() == batch["x"].tolist() or n == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_loader_shows_each_example_once_an_epoch(strategy, workers):
    n = strategy.num_replicas_in_sync
    torch.manual_seed(RANK)  # rank 0's order is everybody's
    loader = DataLoader(
        TensorDataset(torch.arange(21)), batch_size=8, shuffle=True, num_workers=workers
    )
    distributed = strategy.experimental_distribute_dataset(loader)
    epochs = []
    for _ in range(2 - workers):
        steps = steps_of_replicas(strategy, (examples for (examples,) in distributed))
        assert [sum(map(len, step)) for step in steps] == [8, 8, 5]
        assert [list(map(len, step)) for step in steps] == [
            list(map(len, pieces([0] * size, n))) for size in (8, 8, 5)
        ]
        epochs.append(joined(joined(step) for step in steps))
        assert sorted(epochs[-1]) == list(range(21))
    assert len({str(epoch) for epoch in epochs}) == len(epochs)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_a_stream_is_read_by_every_rank_and_cut(strategy):
    n = strategy.num_replicas_in_sync
    distributed = strategy.experimental_distribute_dataset(DataLoader(Stream(), batch_size=4))
    expected = [pieces(batch, n) for batch in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])]
    assert steps_of_replicas(strategy, distributed) == expected


def test_a_function_makes_each_rank_s_own_dataset(strategy):
    k = strategy.extended.num_local_replicas
    contexts = []

    def make(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(4 * context.num_replicas_in_sync)
        return [np.full(size, context.input_pipeline_id * 10 + i) for i in range(2 * k)]

    distributed = strategy.distribute_datasets_from_function(make)
    (context,) = contexts
    assert context == ms.InputContext(SIZE, RANK, SIZE * k)
    assert steps_of_replicas(strategy, distributed) == [
        [[rank * 10 + step * k + i] * 4 for rank in range(SIZE) for i in range(k)]
        for step in range(2)
    ]


def test_training_over_it_equals_training_on_whole_batches(strategy):
    """The gradient of the mean squared error, from what the replicas hold."""
    x = np.arange(20.0).reshape(10, 2)
    total = 0.0
    for batch in strategy.experimental_distribute_dataset([x[:6], x[6:]]):
        part = strategy.run(lambda b: (b**2).sum(axis=1), args=(batch,))
        total += float(strategy.reduce("sum", part, axis=0))
    assert total == (x**2).sum()


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ([np.float32(1)], "call batch first"),
        ([{"a": np.ones(3), "b": np.ones(4)}], r"\[3, 4\]"),
        ([["text"]], "call batch first"),
    ],
)
def test_what_cannot_be_cut(strategy, dataset, words):
    distributed = strategy.experimental_distribute_dataset(dataset)
    if strategy.num_replicas_in_sync == 1:
        assert len(list(distributed)) == 1  # one replica takes it whole
        return
    with pytest.raises(ValueError, match=words):
        list(distributed)


def test_what_is_no_dataset(strategy):
    for bad in (5, None, object()):
        with pytest.raises(ValueError, match="must be an iterable of batches"):
            strategy.experimental_distribute_dataset(bad)
    with pytest.raises(ValueError, match="must be an iterable of batches"):
        strategy.distribute_datasets_from_function(lambda context: None)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_iterate_unequally():
    strategy = ms.MultiWorkerMirroredStrategy()
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    distributed = strategy.experimental_distribute_dataset(loader)

    def epochs():
        for _ in range(2 if RANK == 0 else 1):
            list(distributed)
        strategy.extended.communicator.barrier(label="end of training")

    errors = errors_of_ranks(epochs)
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}
    assert all("sampler of the distributed dataset" in text for _, text, _ in errors)
