"""Hugging Face's `datasets`, the real package: they are map-style."""

import itertools

import datasets
import pytest
from mpi4py import MPI
from torch.utils.data import DataLoader

import mpistrat as ms

WORLD = MPI.COMM_WORLD
EXAMPLES = 23


@pytest.fixture(scope="module")
def rows():
    columns = {"x": [[i, -i] for i in range(EXAMPLES)], "y": list(range(EXAMPLES))}
    return datasets.Dataset.from_dict(columns).with_format("torch")


@pytest.mark.parametrize(
    "batched",
    [
        lambda rows: DataLoader(rows, batch_size=8, shuffle=True),
        lambda rows: ms.input.BatchedDataset(rows, 8, shuffle=True),
    ],
    ids=["DataLoader", "BatchedDataset"],
)
def test_every_row_is_read_once(rows, batched):
    strategy = ms.MultiWorkerMirroredStrategy()
    mine = []
    for step in strategy.experimental_distribute_dataset(batched(rows)):
        assert (step["x"][:, 0] == step["y"]).all()
        mine += step["y"].tolist()
    assert sorted(itertools.chain(*WORLD.allgather(mine))) == list(range(EXAMPLES))
    assert len(mine) <= -(-EXAMPLES // WORLD.size) + 3
