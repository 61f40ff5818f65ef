"""Datasets of one length that differ between ranks are an error on all of them. Differences that are right are not."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

import mpistrat as ms
from support.rank_errors import assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
EXAMPLES = 12
NUMBERS = list(range(EXAMPLES))
SHIFTED = NUMBERS[RANK:] + NUMBERS[:RANK]  # another order on each rank


class Files(Dataset):
    """A dataset with attributes. By default its examples are the indices."""

    def __init__(self, load=float, **attributes):
        self.load = load
        vars(self).update(attributes)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return self.load(index)


def shuffled_numbers(index):
    return SHIFTED[index]


def numbered_in_another_order(index):
    return {"text": f"text {index}", "label": (index + RANK) % 3}


class Listed(list):
    """A list of examples."""


def images():
    return torch.arange(EXAMPLES * 48.0).reshape(EXAMPLES, 3, 4, 4)


WRONG = {
    "split": (
        lambda: random_split(images(), [8, 4], torch.Generator().manual_seed(RANK))[0],
        "Subset.indices[0] is ",
    ),
    "labels": (lambda: TensorDataset(images(), torch.tensor(SHIFTED)), "tensors.1[0][0] is 0 on"),
    "rows": (lambda: Subset(TensorDataset(images()[SHIFTED]), range(10)), "tensors.0[0][0] is"),
    "parts": (lambda: ConcatDataset([Files(x=np.array(SHIFTED))]), "datasets.0.x[0][0] is 0 on"),
    "files": (lambda: Files(names=[f"d/{i}.png" for i in SHIFTED]), "names[0] is 0.png on rank 0"),
    "paths": (lambda: Files(files=[Path(f"d/{i}") for i in SHIFTED[:5]]), "Files.files[0] is 0 on"),
    "samples": (lambda: Files(samples=[("x.png", i) for i in SHIFTED]), "samples[0][1] is 0 on"),
    "classes": (lambda: Files(classes=[f"class {i}" for i in SHIFTED[:4]]), "classes[0] is class"),
    "numbers": (
        lambda: Files(class_to_idx={"a": RANK, "b": 1 - RANK}),
        "class_to_idx[0][1] is 0 on rank 0, and 1 on rank 1",
    ),
    "list": (lambda: Listed((float(i), [i]) for i in SHIFTED), "Listed[0][0] is 0e+00 on rank 0"),
    "examples": (lambda: Files(shuffled_numbers), "Files[0] is 0 on rank 0, and 1 on rank 1"),
    "dicts": (lambda: Files(numbered_in_another_order), "Files[0][0][1] is 0 on rank 0, and 1"),
    "many": (lambda: [*range(RANK, 5000 + RANK)], "list[0] is 0 on rank 0, and 1 on rank 1"),
}


@pytest.fixture(scope="module")
def strategy():
    return ms.MultiWorkerMirroredStrategy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", WRONG)
def test_datasets_of_one_length_that_differ(strategy, case):
    make, words = WRONG[case]
    distributed = strategy.prepare(DataLoader(make(), 4, shuffle=True))
    for name, text, _ in errors_of_ranks(lambda: next(iter(distributed))):
        assert name == "ValueError"
        assert "the datasets of the ranks differ: " in text
        assert words in text
        assert "local_batches=True" in text
    assert_usable(strategy)


class Opened(Files):
    """It opens a file at the first example, and then cannot be pickled."""

    opened = None

    def __getitem__(self, index):
        self.opened = self.opened or open(__file__)  # noqa: SIM115  # it stays open
        return index


class Drawing(Files):
    def __getitem__(self, index):
        return random.random() + np.random.random() + torch.rand(())


class DrawingFromItsOwn(Files):
    def __getitem__(self, index):
        return self.own.random()


class Unpicklable(Files):
    def __reduce_ex__(self, protocol):
        raise TypeError


class Counting(Files):
    count = 0

    def __getitem__(self, index):
        self.count += 1
        return self.count * index * (RANK + 1)


def of_the_process(index):
    return os.getpid()


def failing(index):
    raise OSError("no such file")


def holding_itself():
    dataset = Files()
    vars(dataset).update(dict.fromkeys(("source", "train", "parent"), dataset))
    return dataset


RIGHT = {
    "holding itself": holding_itself,
    "roots": lambda: Files(
        root=f"/tmp/{RANK}", samples=[(f"/tmp/{RANK}/{i}.png", i) for i in NUMBERS]
    ),
    "digits": lambda: TensorDataset(images() * (1 + RANK * 1e-7), torch.tensor(NUMBERS)),
    "rank": lambda: Files(rank=RANK, device=f"cuda:{RANK}", times=[RANK * 0.5], names=set("abc")),
    "cached": lambda: Files(cache=[i if i % SIZE == RANK else None for i in NUMBERS]),
    "opened": Opened,
    "drawing": Drawing,
    "own generator": lambda: DrawingFromItsOwn(own=np.random.default_rng(RANK)),
    "unpicklable": lambda: Unpicklable(shuffled_numbers),
    "lambda": lambda: Files(lambda index: SHIFTED[index]),
    "counting": Counting,
    "of the process": lambda: Files(of_the_process),
    "failing": lambda: Files(failing),
    "nan": lambda: TensorDataset(images() * float("nan"), torch.zeros(EXAMPLES, 0)),
    "strange": lambda: Files(
        meta=torch.zeros(EXAMPLES, device="meta"),
        kinds=np.array([Files] * EXAMPLES),
        number=np.int64(1),
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_differences_that_are_right(strategy, case):
    dataset = RIGHT[case]()
    random.seed(RANK)
    np.random.seed(RANK)
    # Without a batch the program loads no example itself.
    assert list(strategy.prepare(DataLoader(dataset, batch_sampler=[]))) == []
    drawn = [random.random(), np.random.random()]
    assert drawn == [random.Random(RANK).random(), np.random.RandomState(RANK).random()]
    assert vars(dataset).get("opened") is None
    assert vars(dataset).get("count") is None
    if case == "own generator":
        assert dataset.own.random() == np.random.default_rng(RANK).random()


def test_torch_generators_do_not_change(strategy):
    torch.manual_seed(3)
    list(strategy.prepare(DataLoader(TensorDataset(images()), batch_sampler=[])))
    plain = torch.get_rng_state()
    torch.manual_seed(3)
    list(strategy.prepare(DataLoader(Drawing(), batch_sampler=[])))
    assert torch.equal(torch.get_rng_state(), plain)


def test_rows_of_each_rank(strategy):
    loader = DataLoader(Files(shuffled_numbers), 4)
    distributed = strategy.prepare(loader, local_batches=True)
    assert next(iter(distributed)).tolist() == SHIFTED[:4]
