"""A DataLoader with worker processes beside MPI: `loader_workers.py CASE`, on every rank."""

import os
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import mpistrat as ms
from mpistrat.cluster_resolver.launcher import joins_job

case = sys.argv[1]


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None
        joining = [name for name in os.environ if joins_job(name)]
        assert not joining, joining
        return index, os.getppid(), torch.initial_seed() % 2**32


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(12))


class BuildsAStrategy(Numbers):
    def __getitem__(self, index: int) -> Any:
        ms.MultiWorkerMirroredStrategy()
        return index


def loader() -> DataLoader[Any]:
    if case == "iterable":
        return DataLoader(Stream(), 6, num_workers=1)
    if case == "lambda":
        return DataLoader(Numbers(), 6, num_workers=1, collate_fn=lambda batch: batch)
    if case == "strategy":
        return DataLoader(BuildsAStrategy(), 6, num_workers=1)
    persistent = case == "persistent"
    how = "fork" if case == "fork" else None
    return DataLoader(
        Numbers(), 6, num_workers=2, persistent_workers=persistent, multiprocessing_context=how
    )


def main() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    torch.manual_seed(1)
    distributed = strategy.experimental_distribute_dataset(loader())
    parents, seeds = set(), set()
    for _ in range(2):
        total = 0
        for step in distributed:
            numbers = step[0] if case != "iterable" else step
            total += int(torch.as_tensor(numbers).sum())
            if case != "iterable":
                parents |= set(torch.as_tensor(step[1]).tolist())
                seeds |= set(step[2].tolist())
        assert strategy.reduce("sum", np.float64(total), axis=None) == 66
    if case in ("forkserver", "persistent"):
        assert os.getpid() not in parents, "the workers are children of a rank"
    if case == "fork":
        assert parents == {os.getpid()}
    # Of two workers in each epoch, or in all: other ranks' are other ones, though the program has seeded alike.
    of_ranks = strategy.extended.communicator.all_gather_object(seeds)
    assert len(set().union(*of_ranks)) == sum(map(len, of_ranks)), of_ranks
    assert case == "iterable" or len(seeds) == (2 if case == "persistent" else 4), seeds
    print("read everything", flush=True)


if __name__ == "__main__" or case == "no guard":
    main()
