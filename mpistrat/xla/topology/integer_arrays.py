"""Nested sequences of integers that users give, as arrays: lengths along the axes of a mesh, and places in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MESH_RANK = 4  # x, y, z of a chip, and the core on it


def as_lengths(name: str, value: Any, cores: str) -> NDArray[np.int32]:
    """Positive lengths along x, y, z and the cores of a chip. Args: cores: how the error calls the last axis."""
    lengths = _as_integers(name, value)
    if lengths.shape != (MESH_RANK,) or (lengths < 1).any():
        raise ValueError(
            f"{name} must be {MESH_RANK} positive integers (x, y, z, {cores}), got {value!r:.120}"
        )
    return lengths


def as_coordinates(name: str, value: Any, rows: str) -> NDArray[np.int32]:
    """Coordinates of cores in rows of equal length, not to be changed. Args: rows: how the error calls two axes."""
    coordinates = _as_integers(name, value)
    if coordinates.shape[2:] != (MESH_RANK,):
        raise ValueError(
            f"{name} must have the shape [{rows}, {MESH_RANK}], got {list(coordinates.shape)}"
        )
    coordinates.flags.writeable = False
    return coordinates


def _as_integers(name: str, value: Any) -> NDArray[np.int32]:
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
