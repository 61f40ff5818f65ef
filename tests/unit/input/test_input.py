"""Which examples are whose, told without ranks."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
from mpistrat.input.splitting import slice_bounds


@pytest.mark.parametrize(
    ("batch", "replicas", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 4, [2, 2, 2, 1]),
        (4, 3, [2, 2, 0]),
        (2, 3, [1, 1, 0]),
        (0, 2, [0, 0]),
    ],
)
def test_pieces_of_a_batch(batch, replicas, sizes):
    bounds = [slice_bounds(batch, i, replicas) for i in range(replicas)]
    assert [end - first for first, end in bounds] == sizes
    assert [0, *(end for _, end in bounds)] == [*(first for first, _ in bounds), batch]


def test_input_contexts():
    context = ms.InputContext(2, 1, 4)
    assert context.get_per_replica_batch_size(8) == 2
    assert context.get_per_replica_batch_size(0) == 0
    assert ms.InputContext() == ms.InputContext(1, 0, 1)
    assert str(ms.ValueContext(1, 4)) == (
        "mpistrat.ValueContext(replica id 1,  total replicas in sync: 4)"
    )


@pytest.fixture
def pair():
    return ms.MirroredStrategy(["cpu:0", "cpu:1"])


def sums(strategy, dataset):
    return [
        strategy.experimental_local_results(strategy.run(lambda b: int(b.sum()), args=(batch,)))
        for batch in dataset
    ]


def test_replicas_read_their_part(pair):
    distributed = pair.experimental_distribute_dataset([np.arange(4), np.arange(3)])
    assert sums(pair, distributed) == [(1, 5), (1, 2)]
    assert sums(pair, distributed) == [(1, 5), (1, 2)]


def test_a_loader_s_empty_pieces_are_batches_too(pair):
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=4)
    (_, last) = list(pair.experimental_distribute_dataset(loader))
    sizes = pair.run(lambda batch: tuple(batch[0].shape), args=(last,))
    assert pair.experimental_local_results(sizes) == ((1,), (0,))


def test_a_step_lasts_as_long_as_one_replica_has_a_batch(pair):
    distributed = pair.distribute_datasets_from_function(
        lambda context: map(np.full, [2] * 3, [1, 2, 3])
    )
    assert sums(pair, distributed) == [(2, 4), (6, 0)]


def test_with_central_storage_an_unfilled_step_is_made():
    strategy = ms.CentralStorageStrategy(["cpu:0", "cpu:1"])
    distributed = strategy.distribute_datasets_from_function(
        lambda context: map(np.full, [2] * 3, [1, 2, 3])
    )
    assert sums(strategy, distributed) == [(2, 4), (6, 0)]


def test_the_default_strategy_hands_back_the_dataset():
    dataset = [np.ones(2)]
    assert ms.get_strategy().experimental_distribute_dataset(dataset) is dataset
