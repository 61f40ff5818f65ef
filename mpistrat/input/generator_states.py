"""What the states of random generators look like, as plain data that `checkpoint.schema` reads.

Each function raises for what is no such state; it asks the library, and leaves the program's generators alone.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def of_python(state: Any) -> None:
    """As of `random.getstate`."""
    _, _, gauss = state
    if not isinstance(gauss, (float, type(None))):
        raise TypeError(f"its third part is a {type(gauss).__name__}")
    random.Random().setstate(state)


def of_numpy(state: Any) -> None:
    """As of `numpy.random.get_state`, with a list in place of the tuple and the array, or not."""
    _, words, position, _, _ = state
    np.random.RandomState().set_state(tuple(state))
    if position not in range(len(words) + 1):  # NumPy would read beyond them
        raise ValueError(f"it has {len(words)} words, and the next is number {position}")


def of_torch(state: Any) -> None:
    """As of `torch.get_rng_state`."""
    import torch

    torch.Generator().set_state(state)


def of_torch_device(state: Any) -> None:
    """As of a `torch.Generator` of some device, which may not be here."""
    import torch

    if not (isinstance(state, torch.Tensor) and state.dtype is torch.uint8 and state.ndim == 1):
        raise TypeError("it is no vector of bytes")
