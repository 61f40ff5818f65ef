"""Checks the nested sequences of integers that users give, and returns arrays: lengths of a mesh, and coordinates."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MESH_RANK = 4  # x, y, z of a chip, and the core on it


def as_lengths(name: str, value: Any, cores: str) -> NDArray[np.int32]:
    """Return `value` as an int32 array of shape [4]: positive lengths along x, y, z and the cores of a chip.

    Args: name, cores: how errors call the argument and its last length.
    Raises: ValueError if `value` is not four positive integers; TypeError if its numbers are no integers.
    """
    lengths = _as_integers(name, value)
    if lengths.shape != (MESH_RANK,) or (lengths < 1).any():
        raise ValueError(
            f"{name} must be {MESH_RANK} positive integers (x, y, z, {cores}), got {value!r:.120}"
        )
    return lengths


def as_coordinates(name: str, value: Any, rows: str) -> NDArray[np.int32]:
    """Return a copy of `value` as a read-only int32 array of coordinates, shape [n, m, 4].

    The first two axes are tasks and their devices, or replicas and their cores; the last is (x, y, z, core).

    Args: name, rows: how errors call the argument and its first two axes.
    Raises: ValueError for another shape; TypeError if the numbers are no integers.
    """
    coordinates = _as_integers(name, value)
    if coordinates.shape[2:] != (MESH_RANK,):
        raise ValueError(
            f"{name} must have the shape [{rows}, {MESH_RANK}], got {list(coordinates.shape)}"
        )
    coordinates.flags.writeable = False
    return coordinates


def _as_integers(name: str, value: Any) -> NDArray[np.int32]:
    """Return a copy of `value` as an int32 array.

    Raises: TypeError if the numbers are of no integer type, also for 1.0; ValueError if rows have different lengths, or
        if a number does not fit into 32 bits.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths: {value!r:.120}") from None
    if not array.size:  # an empty list has a floating dtype
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {value!r:.120}")
    limits = np.iinfo(np.int32)
    if not limits.min <= array.min() <= array.max() <= limits.max:
        raise ValueError(f"{name} must be integers of 32 bits, got {value!r:.120}")
    return array.astype(np.int32)
