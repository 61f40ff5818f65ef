"""Broken examples, which a dataset gives as None and `collate_fn` leaves out: gradients are those of one process."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset, default_collate

import mpistrat as ms
from support.rank_errors import assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
# The last rank has no example of the last step, where there are several ranks.
BATCH, EXAMPLES = 3 * SIZE, 7 * SIZE
# Of the first step, all that the first rank was to have, where others have some.
BROKEN = {0, 4} if SIZE == 1 else {0, 1, 2, 3 * SIZE + 1, EXAMPLES - 1}


@pytest.fixture(scope="module")
def strategy():
    return ms.MultiWorkerMirroredStrategy()


def example(i):
    return torch.tensor([i / 10, (i % 5) / 5]).double(), torch.tensor([(i % 7) / 3]).double()


class Pictures(Dataset):
    def __init__(self, broken=BROKEN):
        self.broken = broken

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return None if i in self.broken else example(i)


class AtOnce(Pictures):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


Batch = namedtuple("Batch", "x y")


def keep(examples):
    examples[:] = [some for some in examples if some is not None]  # as some programs do it
    return Batch(*default_collate(examples))


SOURCES = {
    "loader": lambda: DataLoader(Pictures(), BATCH, collate_fn=keep),
    "at once": lambda: DataLoader(AtOnce(), BATCH, collate_fn=keep),
    "shuffled": lambda: DataLoader(Pictures(), BATCH, shuffle=True, collate_fn=keep),
    "sampler": lambda: DataLoader(
        Pictures(),
        batch_sampler=[[*range(BATCH)], [BATCH], [*range(BATCH + 1, EXAMPLES)]],
        collate_fn=keep,
    ),
    "worker": lambda: DataLoader(
        Pictures(), BATCH, collate_fn=keep, num_workers=1, multiprocessing_context="fork"
    ),
    "arrays": lambda: ms.input.BatchedDataset(Pictures(), BATCH, collate_fn=keep),
    "files": lambda: ms.input.FileDataset(
        [range(0, 5), range(5, EXAMPLES)],
        lambda file: (Pictures()[i] for i in file),
        BATCH,
        collate_fn=keep,
    ),
}


def steps_of(strategy, source):
    """The gradient of each step, whether its batch is what `keep` makes, and the examples of this and of all ranks."""
    torch.manual_seed(1)
    with strategy.replica():
        model = strategy.mirror(torch.nn.Linear(2, 1).double())
        data = ms.InputOptions(experimental_auto_shard_policy="DATA")
        for batch in strategy.experimental_distribute_dataset(source, data):
            model.zero_grad()
            torch.nn.functional.mse_loss(model(batch.x), batch.y).backward()
            own, total = strategy.step_examples
            yield (
                model.weight.grad.tolist(),
                type(batch) is Batch and len(batch.x) == own,
                own,
                total,
            )


@pytest.mark.parametrize("source", SOURCES)
def test_gradients_are_those_of_one_process(strategy, source, notices):
    alone = ms.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)
    expected = list(steps_of(alone, SOURCES[source]()))
    steps = list(steps_of(strategy, SOURCES[source]()))
    assert len(steps) == len(expected) == 3
    for (gradient, is_whole, own, total), (theirs, _, of_all, _) in zip(
        steps, expected, strict=True
    ):
        np.testing.assert_allclose(gradient, theirs, rtol=1e-12)
        assert is_whole
        assert total == of_all == strategy.reduce("sum", own, axis=None)
    assert sum(total for *_, total in steps) == EXAMPLES - len(BROKEN)
    assert not notices


def test_a_step_of_which_no_example_comes_is_as_in_one_process(strategy):
    def collate(examples):
        came = [some for some in examples if some is not None]
        return default_collate(came) if came else {"nothing of": len(examples)}

    nothing = Pictures(range(EXAMPLES))
    errors = errors_of_ranks(
        lambda: list(steps_of(strategy, DataLoader(nothing, BATCH, collate_fn=keep)))
    )
    assert {name for name, _, _ in errors} == {"IndexError"}
    assert_usable(strategy)
    step, *_ = strategy.experimental_distribute_dataset(
        DataLoader(nothing, BATCH, collate_fn=collate)
    )
    assert step == {"nothing of": 3}
    assert strategy.step_examples is None or strategy.step_examples[1] > 0


def test_several_replicas_of_a_rank():
    """Each counts for itself, and one that has lost all gets a batch of no examples."""
    strategy = ms.MultiWorkerMirroredStrategy(devices=("cpu:0", "cpu:1"), deterministic=True)
    batch = 4 * SIZE
    loader = DataLoader(Pictures({0, 1}), batch, collate_fn=keep)
    step = next(iter(strategy.experimental_distribute_dataset(loader)))
    counts = strategy.run(lambda batch: (len(batch.x), *strategy.step_examples), args=(step,))
    local = strategy.experimental_local_results(counts)
    mine = [0, 2] if RANK == 0 else [2, 2]
    assert local == tuple((own, own, batch - 2) for own in mine)


def test_functions_that_only_one_rank_has(strategy):
    """All ranks count, if one has to."""
    how = {"collate_fn": keep} if RANK == SIZE - 1 else {}
    loader = DataLoader(Pictures({BATCH - 1}), BATCH, **how)
    with strategy.replica():
        next(iter(strategy.experimental_distribute_dataset(loader)))
        assert strategy.step_examples == (3 - (RANK == SIZE - 1), BATCH - 1)


ROWS = {  # what collate_fn makes of examples: whether the ranks have other shares of rows than of examples
    "left out": (lambda x: x[x[:, 0] > 0], True),
    "packed": (lambda x: x.reshape(1, -1), False),
    "two of each": (lambda x: torch.cat([x, x]), False),
    "sequence first": (lambda x: x.new_zeros(5 + RANK, len(x)), False),
    "a list": (lambda x: list(x.new_zeros(len(x), 5 + RANK)), False),
    "no array": (lambda x: "text" * (1 + RANK), False),
}


@pytest.mark.parametrize("case", ROWS)
def test_sizes_of_batches_are_only_told(strategy, case, notices):
    make, differs = ROWS[case]
    loader = DataLoader(Pictures(()), BATCH, collate_fn=lambda e: make(default_collate(e)[0]))
    with strategy.replica():
        for _ in range(2):
            iterator = iter(strategy.experimental_distribute_dataset(loader))
            next(iterator)
            assert strategy.step_examples == (3, BATCH)
    lines = [text for text in notices if "rows of the" in text]
    assert len(lines) == 2 * (differs and SIZE > 1 and RANK == 0)
    if lines:
        assert (
            f"made {BATCH - 1} rows of the {BATCH} examples of a step, 2 of 3 on the first"
            in lines[0]
        )
        assert "let the dataset give None" in lines[0]


@pytest.mark.parametrize("collate", [None, keep])
def test_one_collective_counts_the_examples_of_a_step(strategy, collate):
    """None where torch's own function collates: it leaves nothing out."""
    contract = strategy.extended.communicator.contract
    pictures = Pictures({3} if collate else ())
    steps = iter(strategy.prepare(DataLoader(pictures, 2 * SIZE, collate_fn=collate)))
    next(steps)
    before = contract.calls
    for _ in range(2):
        next(steps)
    assert contract.calls - before == (2 if collate and SIZE > 1 else 0)
    assert len([*steps]) == 1
