"""Nested sequences of integers that users give, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def as_integers(name: str, value: Any) -> NDArray[np.int32]:
    """`value` as an array. Raises: TypeError for what is no integers, be they whole floats; ValueError."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths: {value!r:.120}") from None
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {value!r:.120}")
    limits = np.iinfo(np.int32)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ValueError(f"{name} must be integers of 32 bits, got {value!r:.120}")
    return array.astype(np.int32)
