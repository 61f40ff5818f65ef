"""A restore into other objects than were saved: an error on all ranks, or a notice of one rank, or nothing."""

import random
import warnings

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
}


def objects_of(strategy, optimizer, rate=torch.optim.lr_scheduler.ExponentialLR):
    """A model that has made a step, its optimizer, and its schedule."""
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        made = OPTIMIZERS[optimizer](model.parameters())
    schedule = rate(made, 0.5)

    def step():
        model(torch.ones(2, 2)).sum().backward()
        made.step()

    strategy.run(step)
    schedule.step()
    return {"model": model, "optimizer": made, "schedule": schedule}


class ByEpoch(list):
    """A dataset that may have another length in each epoch."""

    def set_epoch(self, epoch):
        pass


@pytest.mark.parametrize("by_hand", [False, True], ids=["files", "by hand"])
def test_what_is_left_out(directory, notices, by_hand):
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    before = Checkpoint(**objects_of(strategy, "Adam"))
    state = before.state_dict()
    path = CheckpointManager(before, directory).save(1)

    def said_of(*names):
        objects = objects_of(strategy, "Adam")
        after = Checkpoint(**{name: objects[name] for name in names})
        notices.clear()
        if by_hand:
            after.load_state_dict(state)
        else:
            CheckpointManager(after, directory).restore(path)
        return WORLD.allgather(list(notices))

    nothing = [[]] * SIZE
    assert said_of("model", "optimizer", "schedule") == nothing
    assert said_of("model") == nothing  # as for evaluation
    (only,), *others = said_of("model", "optimizer")
    assert "leaves out schedule of" in only
    assert others == nothing[1:]
    (only,), *_ = said_of("optimizer")
    assert "leaves out model, schedule of" in only


@pytest.mark.parametrize("after", ["SGD", "Adamax", "AdamW"])
def test_an_optimizer_of_another_class(directory, notices, after):
    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    saved = Checkpoint(**objects_of(strategy, "Adam"))
    path = CheckpointManager(saved, directory).save(1)
    objects = objects_of(strategy, after)
    manager = CheckpointManager(Checkpoint(**objects), directory)
    notices.clear()
    errors = errors_of_ranks(lambda: manager.restore(path))
    words = f"'optimizer' was saved from the class Adam, and has the class {after} now"
    if after == "AdamW":
        assert errors == [("", "", "")] * SIZE
        (only,), *others = WORLD.allgather(list(notices))
        assert words in only
        assert others == [[]] * (SIZE - 1)
        assert objects["schedule"].state_dict() == saved.objects["schedule"].state_dict()
    else:
        assert {name for name, _, _ in errors} == {"ValueError"}
        assert all(words in message for _, message, _ in errors)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("loader", 0),
        ("loader", 2),
        ("loader by epoch", 2),
        ("arrays", 2),
        ("files", 2),
        ("batches", 2),
    ],
)
@pytest.mark.filterwarnings("ignore:each of the:UserWarning")
def test_a_dataset_of_another_length(kind, steps):
    strategy = ms.MultiWorkerMirroredStrategy()

    def distributed(length):
        if kind.startswith("loader"):
            examples = ByEpoch(range(length)) if kind == "loader by epoch" else range(length)
            dataset = torch.utils.data.DataLoader(examples, 8, shuffle=True)
        elif kind == "arrays":
            dataset = ms.input.BatchedDataset(np.arange(length), 8)
        elif kind == "files":
            dataset = ms.input.FileDataset(range(length), lambda _: iter(range(8)), 8)
        else:
            dataset = [np.arange(8)] * length
        return strategy.experimental_distribute_dataset(dataset)

    before = distributed(40)
    iterator = iter(before)
    for _ in range(steps):
        next(iterator)
    state = iterator.state_dict()
    distributed(40).load_state_dict(state)
    without_length = {name: value for name, value in state.items() if name != "length"}
    distributed(41).load_state_dict(without_length)  # of an earlier version
    errors = errors_of_ranks(lambda: distributed(41).load_state_dict(state))
    if steps and kind != "loader by epoch":
        assert {name for name, _, _ in errors} == {"ValueError"}
        assert all("'length': 40" in text and "'length': 41" in text for _, text, _ in errors)
    else:
        assert errors == [("", "", "")] * SIZE


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "by rank"])
def test_random_numbers_of_new_ranks(directory, alike):
    """All ranks but the last have saved."""
    seed = 1 if alike else RANK
    torch.manual_seed(seed)
    random.seed(RANK)
    np.random.seed(seed)
    some = WORLD.Split(RANK < SIZE - 1, RANK)
    if RANK < SIZE - 1:
        with ms.MultiWorkerMirroredStrategy(comm=some).scope():
            CheckpointManager(Checkpoint(n=ms.Variable(1)), directory).save(1)
    WORLD.barrier()
    torch.manual_seed(99 + RANK)
    with ms.MultiWorkerMirroredStrategy().scope():
        manager = CheckpointManager(Checkpoint(n=ms.Variable(0)), directory)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manager.restore_or_initialize()
    of_torch, of_numpy, of_python = zip(
        *WORLD.allgather((torch.rand(1).item(), np.random.rand(), random.random())), strict=True
    )
    number = 1 if alike else SIZE
    assert len(set(of_torch)) == len(set(of_numpy)) == number
    assert len(set(of_python)) == SIZE
    said = WORLD.allgather([str(warning.message) for warning in caught])
    assert any(said) is not alike
