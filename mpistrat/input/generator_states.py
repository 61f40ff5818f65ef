"""Checks of the states of random generators, for `checkpoint.schema`; and the loaders that wait for a restore's end.

Each function raises an exception if its argument is not such a state, and else returns None. It sets a new generator to
the state, so the program's generators do not change.
"""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np

# The `RandomState`s of loaders that go on from a saved state. A restore calls their `remember` at its end.
loaded: weakref.WeakSet[Any] = weakref.WeakSet()


def of_python(state: Any) -> None:
    """Check a state of `random.getstate`. Raises: TypeError, or an exception of `random`, for other objects."""
    _, _, gauss = state
    if not isinstance(gauss, (float, type(None))):
        raise TypeError(f"its third part is a {type(gauss).__name__}")
    random.Random().setstate(state)


def of_numpy(state: Any) -> None:
    """Check a state of `numpy.random.get_state`; lists may stand for the tuple and the array.

    Raises: an exception of NumPy, or ValueError if the position lies beyond the words.
    """
    _, words, position, _, _ = state
    np.random.RandomState().set_state(tuple(state))
    if position not in range(len(words) + 1):  # NumPy would read beyond the words
        raise ValueError(f"it has {len(words)} words, and the next is number {position}")


def of_torch(state: Any) -> None:
    """Check a state of `torch.get_rng_state`. Raises: an exception of torch for other objects."""
    import torch

    torch.Generator().set_state(state)


def of_torch_device(state: Any) -> None:
    """Check a state of a `torch.Generator` of any device; this machine may lack the device.

    Raises: TypeError if the state is not a one-dimensional uint8 tensor.
    """
    import torch

    if not (isinstance(state, torch.Tensor) and state.dtype is torch.uint8 and state.ndim == 1):
        raise TypeError("it is no vector of bytes")
