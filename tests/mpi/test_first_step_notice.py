"""One line, where training on several ranks begins: how many there are, and what a global batch is."""

import logging

import numpy as np
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = f"mpistrat: {SIZE} ranks on 1 node"


def lines(strategy, batches, capsys, **how):
    """What is said of ranks and batches in two epochs, and at the end of the first step."""
    capsys.readouterr()
    with strategy.replica():
        distributed = strategy.prepare(batches, **how)
        for _ in range(2):
            for _ in distributed:
                pass
    said = capsys.readouterr().err.splitlines()
    return [line for line in said if " on 1 node" in line]


def loader(batch_size, **how):
    return DataLoader(TensorDataset(torch.arange(4 * batch_size)), batch_size, **how)


def alone(*said):
    """On the first of several ranks."""
    return [*said] if RANK == 0 and SIZE > 1 else []


def test_it_is_said_once(capsys):
    strategy = ms.MultiWorkerMirroredStrategy()
    expected = alone(f"{RANKS}; a global batch of {32 * SIZE} is {SIZE} x 32")
    assert lines(strategy, loader(32 * SIZE), capsys) == expected
    assert lines(strategy, loader(8), capsys) == []


PARTS = {  # of a batch of 5
    2: "3 + 2",
    3: "2 x 2 + 1",
    4: "2 x 2 + 1 + 0",
}


def test_parts_that_differ(capsys):
    expected = alone(f"{RANKS}; a global batch of 5 is {PARTS.get(SIZE)}")
    assert lines(ms.MultiWorkerMirroredStrategy(), loader(5), capsys) == expected


def test_a_step_of_which_examples_are_dropped(capsys):
    """The loader's batch is what is shared out."""
    broken = [None, *map(torch.tensor, range(4 * SIZE - 1))]
    keep = DataLoader(
        broken, 2 * SIZE, collate_fn=lambda e: torch.stack([x for x in e if x is not None])
    )
    expected = alone(f"{RANKS}; a global batch of {2 * SIZE} is {SIZE} x 2")
    assert lines(ms.MultiWorkerMirroredStrategy(), keep, capsys) == expected


def test_batches_of_which_ranks_do_not_know_the_whole(capsys):
    strategy = ms.MultiWorkerMirroredStrategy()
    assert lines(strategy, loader(4), capsys, local_batches=True) == alone(RANKS)


def test_it_can_be_silenced(capsys):
    logger = logging.getLogger("mpistrat")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        assert lines(ms.MultiWorkerMirroredStrategy(), loader(8), capsys) == []
    finally:
        logger.setLevel(level)


def test_replicas_of_a_rank(capsys):
    strategy = ms.MultiWorkerMirroredStrategy(devices=("cpu:0", "cpu:1"))
    batch = 4 * SIZE
    capsys.readouterr()
    next(iter(strategy.experimental_distribute_dataset([np.arange(batch)])))
    said = capsys.readouterr().err.splitlines()
    expected = alone(f"{RANKS}; a global batch of {batch} is {2 * SIZE} x 2")
    assert [line for line in said if " on 1 node" in line] == expected
