"""`mpistrat-bench input`: compares distributed datasets with a DistributedSampler, or with plain batches."""

from __future__ import annotations

import collections
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mpistrat.input import BatchedDataset, FileDataset
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.tools.bench.report import Row
from mpistrat.tools.bench.rounds import all_ranks, compare, medians

_Batches = Iterable[Any]
_Epoch = Callable[[], object]  # reads an epoch
_Rows = list[Row]

IMAGE = (3, 32, 32)
BATCH = 64  # examples per rank and step
BYTES = 3 * 32 * 32
STEPS = 400  # in an epoch, when overhead is measured


class Images(Dataset[tuple[torch.Tensor, int]]):
    """A dataset of images [3, 32, 32] in a file of bytes. `images[i]` reads image i, and normalises it as float32.

    Its label is i modulo 10.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._examples = os.path.getsize(path) // BYTES
        self._file: int | None = None

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._file is None:  # each worker process opens the file for itself
            self._file = os.open(self.path, os.O_RDONLY)
        content = os.pread(self._file, BYTES, index * BYTES)
        pixels = np.frombuffer(content, np.uint8)
        image = (pixels.astype(np.float32) - 127.5) / 64.0
        return torch.from_numpy(image.reshape(IMAGE)), index % 10


def through(batches: _Batches) -> _Epoch:
    """Return a function that iterates once over `batches` and drops each batch."""

    def epoch() -> None:
        collections.deque(batches, maxlen=0)

    return epoch


def with_sampler(path: str, **how: Any) -> _Epoch:
    """Return a function that reads this rank's part of a shuffled epoch by a DataLoader with a DistributedSampler.

    Programs for DistributedDataParallel do so.   `how`: arguments of the DataLoader.
    """
    images = Images(path)
    sampler = DistributedSampler[Any](images, all_ranks().size, all_ranks().rank)
    epoch = through(DataLoader(images, BATCH, sampler=sampler, **how))

    def shuffled_epoch() -> None:
        sampler.set_epoch(sampler.epoch + 1)
        epoch()

    return shuffled_epoch


def distributed(path: str, **how: Any) -> _Epoch:
    """Return a function that reads this rank's part of an epoch of a DataLoader that mpistrat distributes.

    `how`: arguments of the DataLoader.
    """
    loader = DataLoader(Images(path), BATCH * all_ranks().size, shuffle=True, **how)
    return through(MultiWorkerMirroredStrategy().experimental_distribute_dataset(loader))


def throughput(examples: int, num_rounds: int) -> _Rows:
    """Measure how many examples per second all ranks together read, by a DistributedSampler and by mpistrat.

    Both are measured without a worker process of the DataLoader, and with one per rank.   Called by: every rank.
    Args: examples: the examples of an epoch.
    Returns: a row for each contestant, from the median epoch; samples are the slowest rank's microseconds per epoch.
    """
    rows: _Rows = []
    with tempfile.NamedTemporaryFile() as file:
        random = np.random.default_rng(0)
        pixels = random.integers(0, 256, (examples, *IMAGE), np.uint8)
        pixels.tofile(file.name)
        in_process = {
            "DistributedSampler": with_sampler(file.name),
            "mpistrat": distributed(file.name),
        }
        by_worker = _by_worker(file.name)
        for workers, contestants in enumerate((in_process, by_worker)):
            rounds = compare(contestants, repeat=1, num_rounds=num_rounds)
            times = medians(rounds)
            rows += [
                {
                    "DataLoader": name,
                    "workers per rank": workers,
                    "examples/s": examples / us * 1e6,
                    "mpistrat / this": us / times["mpistrat"],
                    "samples": rounds[name],
                }
                for name, us in times.items()
            ]
    return rows


def _by_worker(path: str) -> dict[str, _Epoch]:
    """Return the contestants that read by one worker process per rank."""
    worker: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    forkserver = {**worker, "multiprocessing_context": "forkserver"}
    return {
        "DistributedSampler, fork": with_sampler(path, **worker),
        "DistributedSampler, forkserver": with_sampler(path, **forkserver),
        "mpistrat": distributed(path, **worker),
    }


class Endless:
    """An iterable over batches that has no length."""

    def __init__(self, batches: _Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def overhead(num_rounds: int) -> _Rows:
    """Measure the microseconds per step of a distributed dataset, and of this rank's batches without it.

    Called by: every rank.
    Returns: a row for each kind of dataset, from the median epoch of 400 steps; samples are the slowest rank's
        microseconds per epoch.
    """
    strategy = MultiWorkerMirroredStrategy()
    distribute = strategy.experimental_distribute_dataset
    by_function = strategy.distribute_datasets_from_function
    size = all_ranks().size
    whole = np.zeros((STEPS * 4 * size, 8), np.float32)
    part = np.split(whole, size)[all_ranks().rank]
    batch = 4 * size
    files = np.split(whole, batch)
    my_dataset = FileDataset(np.split(part, 4), iter, 4)
    tensors: Any = torch.from_numpy(whole)
    my_tensors: Any = torch.from_numpy(part)
    batches = np.split(part, STEPS)
    endless = Endless(batches)
    pairs: dict[str, tuple[_Batches, _Batches]] = {
        "DataLoader": (DataLoader(my_tensors, 4), distribute(DataLoader(tensors, batch))),
        "BatchedDataset": (BatchedDataset(part, 4), distribute(BatchedDataset(whole, batch))),
        "FileDataset": (my_dataset, distribute(FileDataset(files, iter, batch))),
        "function, of a list": (batches, by_function(lambda context: batches)),
        "function, of an iterable without a length": (endless, by_function(lambda _: endless)),
    }
    rows = []
    for name, (alone, distributed) in pairs.items():
        assert len(list(distributed)) == len(list(alone)) == STEPS
        contestants = {"alone": through(alone), "distributed": through(distributed)}
        rounds = compare(contestants, repeat=1, num_rounds=num_rounds)
        times = medians(rounds)
        us_alone = times["alone"] / STEPS
        us_distributed = times["distributed"] / STEPS
        rows.append(
            {
                "a step of": name,
                "alone us": us_alone,
                "distributed us": us_distributed,
                "difference us": us_distributed - us_alone,
                "limit us": 30.0,
                "samples": rounds,
            }
        )
    return rows
