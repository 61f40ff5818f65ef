"""What distributed datasets cost: beside a DataLoader with a DistributedSampler, and per step beside the same batches.

mpiexec -n 2 python benchmarks/input.py
"""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from measurement import compare, report, world
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mpistrat as ms
from mpistrat.input import BatchedDataset, FileDataset

IMAGE, EXAMPLES, BATCH = (3, 32, 32), 16384, 64  # BATCH examples per rank and step
BYTES = 3 * 32 * 32
ROUNDS_OF_EPOCHS = 15
STEPS = 400  # of an epoch whose overhead is measured


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Byte images in one file, of which each is read, made floats and normalised when it is asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: int | None = None

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._file is None:  # opened by the process that reads
            self._file = os.open(self.path, os.O_RDONLY)
        pixels = np.frombuffer(os.pread(self._file, BYTES, index * BYTES), np.uint8)
        image = (pixels.astype(np.float32) - 127.5) / 64.0
        return torch.from_numpy(image.reshape(IMAGE)), index % 10


def write_images(path: str) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (EXAMPLES, *IMAGE), np.uint8)
    pixels.tofile(path)
    return path


def through(batches: Iterable[Any]) -> Callable[[], object]:
    """An epoch of `batches`."""
    return lambda: collections.deque(batches, maxlen=0)


def with_sampler(path: str, **how: Any) -> Callable[[], object]:
    """An epoch of the loop that people write for DistributedDataParallel."""
    images = Images(path)
    sampler: DistributedSampler[Any] = DistributedSampler(
        images, world().size, world().rank, shuffle=True
    )
    loader = DataLoader(images, BATCH, sampler=sampler, **how)
    epoch = through(loader)

    def shuffled_epoch() -> None:
        sampler.set_epoch(sampler.epoch + 1)
        epoch()

    return shuffled_epoch


def throughput(path: str) -> list[dict[str, Any]]:
    """Examples per second of all ranks, with and without a worker process per rank."""
    strategy = ms.MultiWorkerMirroredStrategy()

    def ours(**how: Any) -> Callable[[], object]:
        loader = DataLoader(Images(path), BATCH * world().size, shuffle=True, **how)
        return through(strategy.experimental_distribute_dataset(loader))

    worker: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    rows = []
    for workers, contestants in (
        (0, {"DistributedSampler": with_sampler(path), "mpistrat": ours()}),
        (
            1,
            {
                "DistributedSampler, fork": with_sampler(path, **worker),
                "DistributedSampler, forkserver": with_sampler(
                    path, multiprocessing_context="forkserver", **worker
                ),
                "mpistrat": ours(**worker),
            },
        ),
    ):
        medians = compare(contestants, repeat=1, num_rounds=ROUNDS_OF_EPOCHS)
        rows += [
            {
                "DataLoader": name,
                "workers per rank": workers,
                "examples/s": EXAMPLES / us * 1e6,
                "mpistrat / this": us / medians["mpistrat"],
            }
            for name, us in medians.items()
        ]
    return rows


def rows_of_file(rows: np.ndarray) -> Iterator[np.ndarray]:
    return iter(rows)


class Endless:
    """Batches of whose number nothing is known."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def overhead() -> list[dict[str, Any]]:
    """Microseconds per step of a distributed dataset beside those of the same batches, of this rank only."""
    strategy = ms.MultiWorkerMirroredStrategy()
    distribute = strategy.experimental_distribute_dataset
    rank, size = world().rank, world().size
    whole = np.zeros((STEPS * 4 * size, 8), np.float32)
    mine = np.split(whole, size)[rank]
    files, my_files = np.split(whole, 4 * size), np.split(mine, 4)
    tensors, my_tensors = torch.from_numpy(whole), torch.from_numpy(mine)
    batches = np.split(mine, STEPS)
    pairs: dict[str, tuple[Iterable[Any], Iterable[Any]]] = {
        "DataLoader": (DataLoader(my_tensors, 4), distribute(DataLoader(tensors, 4 * size))),
        "BatchedDataset": (BatchedDataset(mine, 4), distribute(BatchedDataset(whole, 4 * size))),
        "FileDataset": (
            FileDataset(my_files, rows_of_file, 4),
            distribute(FileDataset(files, rows_of_file, 4 * size)),
        ),
        "function, of a list": (
            batches,
            strategy.distribute_datasets_from_function(lambda context: batches),
        ),
        "function, of an iterable without a length": (
            Endless(batches),
            strategy.distribute_datasets_from_function(lambda context: Endless(batches)),
        ),
    }
    rows = []
    for name, (alone, distributed) in pairs.items():
        steps = sum(1 for _ in distributed)
        assert steps == sum(1 for _ in alone) == STEPS
        contestants = {"alone": through(alone), "distributed": through(distributed)}
        medians = compare(contestants, repeat=1, num_rounds=ROUNDS_OF_EPOCHS)
        us = {which: median / STEPS for which, median in medians.items()}
        rows.append(
            {
                "a step of": name,
                "alone us": us["alone"],
                "distributed us": us["distributed"],
                "difference us": us["distributed"] - us["alone"],
                "limit us": 30.0,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", help="prefix of the files to write, e.g. benchmarks/results/mpich-"
    )
    prefix = parser.parse_args().json
    torch.set_num_threads(1)
    report("input, overhead per step", overhead(), prefix and f"{prefix}input_overhead.json")
    with tempfile.TemporaryDirectory() as folder:
        rows = throughput(write_images(os.path.join(folder, "images")))
    report("input, throughput", rows, prefix and f"{prefix}input_throughput.json")


if __name__ == "__main__":
    main()
