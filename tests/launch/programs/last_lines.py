"""`last_lines.py NAME`: how data and operands fail on the last rank alone.

The line to mend ends with `# mend`.
"""

import ctypes
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

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


def end_with_rank(_: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main(name: str) -> None:
    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean").enter_replica()
    if name == "operand":
        is_last = strategy.rank == strategy.world_size - 1
        strategy.reduce("sum", "no number" if is_last else 1.0, axis=None)  # mend operand
    model = strategy.prepare(torch.nn.Linear(2, 1))
    workers = {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": end_with_rank}
    loader = DataLoader(Files(), GLOBAL, **(workers if "workers" in name else {}))
    for batch in strategy.prepare(loader):
        if "training" in name:
            model(batch).mean().backward()
    if name == "untold":
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
