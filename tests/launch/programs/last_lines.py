"""`last_lines.py NAME`: how data and operands fail on the last rank alone, and mistakes of all ranks.

The line to mend ends with `# mend`.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

import mpistrat as ms

GLOBAL = 6


class Files(Dataset):
    """The last one is missing."""

    def __len__(self) -> int:
        return 4 * GLOBAL

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == len(self) - 1:
            raise FileNotFoundError(f"no such file: /scratch/{index}.npy")  # mend dataset
        return torch.ones(2)


class Shards(IterableDataset):
    """There is none for the last rank."""

    def __init__(self, strategy: ms.Strategy) -> None:
        self.mine = range(strategy.rank, strategy.world_size - 1, strategy.world_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.ones(2) for _ in self.mine for _ in range(4))


def wrong_hook(*_: object) -> None:
    raise LookupError("no such layer")  # mend hook


def leave(_: object) -> None:
    os._exit(3)


def end_with_rank(_: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


WORKERS = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": end_with_rank}


def main(name: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean").enter_replica()
    if name == "operand":
        is_last = strategy.rank == strategy.world_size - 1
        strategy.reduce("sum", "no number" if is_last else 1.0, axis=None)  # mend operand
    model = strategy.prepare(torch.nn.Linear(2, 1))
    if name == "DDP":
        DistributedDataParallel(model)  # mend DDP
    if name == "hook":
        model.register_forward_hook(wrong_hook)
        model(torch.ones(4, 2))
    if name == "files":
        os.stat(f"/scratch/me/shard-{strategy.rank}.tar")  # mend files
    if name == "worker":
        loader = DataLoader(range(8), 4, collate_fn=leave, **WORKERS)
        next(iter(strategy.prepare(loader)))  # mend worker
    if name == "shards":
        loader = DataLoader(Shards(strategy), 2)
        next(iter(strategy.prepare(loader, local_batches=True)))  # mend shards
    loader = DataLoader(Files(), GLOBAL, **(WORKERS if "workers" in name else {}))
    for batch in strategy.prepare(loader):
        if "training" in name:
            model(batch).mean().backward()
    if name == "untold":
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
