"""Datasets that cannot be distributed, or fail on one rank: one clear error on all ranks, and nothing hangs."""

import re

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset

import mpistrat as ms
from mpistrat import nest
from support.rank_errors import errors_of_ranks

pytestmark = pytest.mark.filterwarnings("ignore:each of the:UserWarning")

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
several = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module")
def strategy():
    return ms.MultiWorkerMirroredStrategy()


def assert_usable(strategy):
    assert strategy.reduce("sum", 1.0, axis=None) == SIZE


def whole(dataset):
    """Go through it, and train with what comes: ranks meet in a reduction after each step."""

    def program(strategy):
        for step in strategy.experimental_distribute_dataset(dataset()):
            total = sum(float(np.asarray(part).sum()) for part in nest.flatten(step))
            strategy.reduce("sum", total, axis=None)

    return program


def names(errors):
    return {name for name, _, _ in errors}


class Fails(Dataset):
    """An example of the last quarter fails: with more than one rank, on some ranks only."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 15:
            raise KeyError("broken example")
        return torch.tensor(float(index))


def reads_badly(file):
    for i in range(4):
        if (file, i) == (2, 3):
            raise OSError("broken file")
        yield float(i)


def changes():
    yield np.ones(8)
    yield (np.ones(8), np.ones(8))


EVERYWHERE = {
    "unbatched": (lambda: [np.float32(1)], "ValueError", "call batch first"),
    "ragged": (lambda: [(np.ones(3), np.ones(4))], "ValueError", r"\[3, 4\]"),
    "arrays of different lengths": (
        lambda: ms.input.BatchedDataset((np.ones(2), np.ones(3)), 2),
        "ValueError",
        "first dimension",
    ),
}


@several
@pytest.mark.parametrize("case", EVERYWHERE)
def test_what_is_wrong_on_all_ranks(strategy, case):
    dataset, error, words = EVERYWHERE[case]
    errors = errors_of_ranks(lambda: whole(dataset)(strategy))
    assert names(errors) == {error}
    for _, text, _ in errors:
        assert re.search(words, text), text
    assert_usable(strategy)


def test_a_dataset_that_changes_its_structure(strategy):
    """The structure is the program's: each step is handed on as it is."""
    first, second = strategy.experimental_distribute_dataset(changes())
    share = -(-8 // SIZE)
    assert len(first) == len(second[1]) == min(8, (RANK + 1) * share) - min(8, RANK * share)
    assert type(second) is tuple
    assert_usable(strategy)


@several
@pytest.mark.parametrize(
    "dataset",
    [
        lambda: DataLoader(Fails(), batch_size=8),
        lambda: ms.input.BatchedDataset(Fails(), 8),
    ],
    ids=["DataLoader", "BatchedDataset"],
)
def test_an_example_that_fails_on_one_rank(strategy, dataset):
    """The others, which wait in the reduction, are told what it was."""
    errors = errors_of_ranks(lambda: whole(dataset)(strategy))
    assert names(errors) == {"CollectiveMismatchError"}
    assert all("broken example" in text for _, text, _ in errors)
    assert_usable(strategy)


@several
def test_a_reader_that_fails_on_one_rank(strategy):
    dataset = ms.input.FileDataset(range(max(4, SIZE)), reads_badly, 4 * SIZE)
    errors = errors_of_ranks(lambda: whole(lambda: dataset)(strategy))
    mine = 2 % SIZE
    assert errors[mine][0] == "OSError"
    assert names(errors[:mine] + errors[mine + 1 :]) == {"RuntimeError"}
    assert all("broken file" in text for _, text, _ in errors)
    assert all(
        f"rank {mine} could not read" in text
        for rank, (_, text, _) in enumerate(errors)
        if rank != mine
    )
    assert_usable(strategy)


@several
def test_fewer_files_than_workers(strategy):
    files = ms.input.FileDataset(range(SIZE - 1), iter, 4)
    for policy in ("AUTO", "FILE"):
        options = ms.InputOptions(experimental_auto_shard_policy=policy)
        errors = errors_of_ranks(
            lambda options=options: strategy.experimental_distribute_dataset(files, options)
        )
        assert names(errors) == {"InvalidArgumentError"}
        assert all(f"there are {SIZE - 1}" in text for _, text, _ in errors)
    data = ms.InputOptions(experimental_auto_shard_policy="DATA")
    strategy.experimental_distribute_dataset(files, data)


@several
def test_files_of_a_dataset_that_has_none(strategy):
    options = ms.InputOptions(experimental_auto_shard_policy="FILE")
    for dataset in ([np.ones(4)], DataLoader(Fails(), 4), ms.input.BatchedDataset(np.ones(4), 2)):
        errors = errors_of_ranks(
            lambda dataset=dataset: strategy.experimental_distribute_dataset(dataset, options)
        )
        assert names(errors) == {"NotFoundError"}


def test_a_function_that_returns_no_dataset(strategy):
    errors = errors_of_ranks(lambda: strategy.distribute_datasets_from_function(lambda _: 5))
    assert names(errors) == {"ValueError"}
    assert all("must return a dataset" in text for _, text, _ in errors)


@several
def test_a_function_that_fails_on_one_rank(strategy):
    def make(context):
        if context.input_pipeline_id == LAST:
            raise RuntimeError("no such folder")
        return [np.ones(2)]

    errors = errors_of_ranks(lambda: strategy.distribute_datasets_from_function(make))
    assert errors[LAST][0] == "RuntimeError"
    assert all("no such folder" in text for _, text, _ in errors)
    assert len([name for name, _, _ in errors if name != "None"]) == SIZE
    assert_usable(strategy)


@several
def test_functions_whose_datasets_differ_in_structure(strategy):
    """The ranks are handed their batches. Only a rank that has none must know the structure of the others'."""

    def make(context):
        return [{"x": np.ones(2)} if context.input_pipeline_id == LAST else np.ones(2)]

    (step,) = strategy.distribute_datasets_from_function(make)
    assert type(step) is (dict if RANK == LAST else np.ndarray)
    if SIZE > 2:

        def make_for_some(context):
            return [] if context.input_pipeline_id == 1 else make(context)

        errors = errors_of_ranks(
            lambda: list(strategy.distribute_datasets_from_function(make_for_some))
        )
        assert names(errors) == {"ValueError"}
        assert all("different structures or dtypes" in text for _, text, _ in errors)
    assert_usable(strategy)


@several
def test_ranks_with_different_amounts_of_data(strategy):
    """Those whose data has ended get batches of no examples, of the right kind, until all have ended."""

    def make(context):
        return iter([np.full((2, 3), RANK, "f4")] * (RANK * 2))

    steps = list(strategy.distribute_datasets_from_function(make))
    assert len(steps) == 2 * LAST
    assert [len(step) for step in steps] == [2] * (2 * RANK) + [0] * (2 * LAST - 2 * RANK)
    assert {(step.shape[1:], step.dtype.name) for step in steps} == {((3,), "float32")}
    mean = strategy.reduce("mean", steps[-1], axis=0)
    np.testing.assert_array_equal(mean, np.full(3, LAST, "f4"))


@several
def test_gradients_are_right_where_a_replica_has_no_examples(strategy):
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
    x = torch.arange(1.0, 2 * SIZE)[:, None]  # the last rank gets one, or none

    def step(batch):
        losses = (model(batch) ** 2).sum(1)
        loss = ms.compute_average_loss(losses, global_batch_size=len(x))
        model.zero_grad()
        loss.backward()
        return model.weight.grad.clone()

    for share in (x, x[:1]):
        for batch in strategy.experimental_distribute_dataset(DataLoader(share, len(share))):
            gradient = strategy.run(step, args=(batch,))
            expected = 2 * model.weight.detach() * (share**2).sum() / len(x)
            torch.testing.assert_close(gradient, expected)
