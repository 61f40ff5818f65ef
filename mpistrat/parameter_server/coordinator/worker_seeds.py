"""Random numbers of workers: all run one script, with its seeds, and are to draw different ones."""

from __future__ import annotations

import random
import sys

import numpy as np


def seed_for_worker(worker: int) -> None:
    """Seed Python's, NumPy's and torch's generators by their own next number and that of the worker, from 0.

    So a script that seeds them has the same numbers each time it is run, and others on each worker; as workers of a
    DataLoader have them.
    """
    random.seed(random.getrandbits(64) + worker)
    np.random.seed([np.random.randint(1 << 31), worker])
    if "torch" in sys.modules:
        import torch

        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
        torch.manual_seed(int(drawn) + worker)
