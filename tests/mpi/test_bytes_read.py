"""Of a dataset in files, each rank reads its share of the bytes and no more than a twentieth beside it."""

import itertools
import os

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, Dataset

import mpistrat as ms
from mpistrat.input import BatchedDataset, FileDataset

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
EXAMPLE, EXAMPLES = 8192, 960  # bytes, and how many: they divide by 1, 2, 3 and 4 ranks
TOTAL = EXAMPLE * EXAMPLES
FILES = 16
MOST = 1 / SIZE + 0.05


class Counted:
    """Bytes read through it."""

    def __init__(self):
        self.bytes = 0

    def read(self, path, size, offset):
        file = os.open(path, os.O_RDONLY)
        try:
            data = os.pread(file, size, offset)
        finally:
            os.close(file)
        self.bytes += len(data)
        return np.frombuffer(data, np.uint8).copy()


class Records(Dataset):
    """The examples of one file, each read when it is asked for."""

    def __init__(self, path, counted):
        self.path, self.counted = path, counted

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return self.counted.read(self.path, EXAMPLE, index * EXAMPLE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """On every rank a copy of its own; example i begins with the number i."""
    folder = tmp_path_factory.mktemp("examples")
    examples = np.zeros((EXAMPLES, EXAMPLE), np.uint8)
    examples[:, :2] = np.arange(EXAMPLES, dtype=np.uint16)[:, None].view(np.uint8)
    examples.tofile(folder / "all")
    for number, part in enumerate(np.split(examples, FILES)):
        part.tofile(folder / f"part-{number:02}")
    return folder


@pytest.fixture(params=[1, 2], ids=["k=1", "k=2"])
def strategy(request):
    return ms.MultiWorkerMirroredStrategy(devices=[f"cpu:{i}" for i in range(request.param)])


def read_by_the_process():
    """Bytes that this process has asked the kernel for, from the page cache too; None where that is not told."""
    try:
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
    except (OSError, StopIteration):
        return None


def check_an_epoch(strategy, dataset, counted, policy):
    """Every example is seen once; every rank has read its share."""
    options = ms.InputOptions(experimental_auto_shard_policy=policy)
    distributed = strategy.experimental_distribute_dataset(dataset, options)
    before, counted.bytes = read_by_the_process(), 0
    numbers = []
    for step in distributed:
        for batch in strategy.experimental_local_results(step):
            numbers += np.ascontiguousarray(np.asarray(batch)[:, :2]).view(np.uint16).tolist()
    after = read_by_the_process()
    everybody = itertools.chain.from_iterable(WORLD.allgather(numbers))
    assert sorted(number for (number,) in everybody) == list(range(EXAMPLES))
    counts = WORLD.allgather(counted.bytes)
    assert max(counts) <= MOST * TOTAL, [count / TOTAL for count in counts]
    if before is not None and after is not None:
        read = WORLD.allgather(after - before)
        assert max(read) <= MOST * TOTAL, [count / TOTAL for count in read]


@pytest.mark.parametrize("policy", ["DATA", "AUTO"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_a_map_style_dataset(strategy, folder, policy, shuffle):
    counted = Counted()
    torch.manual_seed(0)
    loader = DataLoader(Records(folder / "all", counted), batch_size=96, shuffle=shuffle)
    check_an_epoch(strategy, loader, counted, policy)


@pytest.mark.parametrize("policy", ["DATA", "AUTO"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_a_map_style_dataset(strategy, folder, policy, shuffle):
    counted = Counted()
    dataset = BatchedDataset(Records(folder / "all", counted), 96, shuffle=shuffle)
    check_an_epoch(strategy, dataset, counted, policy)


@pytest.mark.parametrize("policy", ["FILE", "AUTO"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_files(strategy, folder, policy, shuffle):
    counted = Counted()

    def examples_of(path):
        for first in range(EXAMPLES // FILES):
            yield counted.read(path, EXAMPLE, first * EXAMPLE)

    files = sorted(folder.glob("part-*"))
    check_an_epoch(strategy, FileDataset(files, examples_of, 96, shuffle=shuffle), counted, policy)
