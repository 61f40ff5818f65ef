"""Orders of the chips of a box, in which each is linked with the next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Chip = tuple[int, ...]


def ring_order(shape: Sequence[int]) -> NDArray[np.int64]:
    """The chips of a box of `shape` (x, y, z) in an order that ends beside (0, 0, 0), where it begins.

    With a length that is odd there is none: then the order is x by x, y by y, z by z. So it is of a single line, whose
    ends only a torus links.

    Returns: integers of shape [chips, 3].
    """
    lengths = np.asarray(shape)
    long = lengths[lengths > 1]
    if len(long) < 2 or (long % 2).any():
        z, y, x = np.indices(tuple(reversed(shape))).reshape(3, -1)
        return np.stack([x, y, z], axis=-1)
    axes = np.argsort(lengths == 1, kind="stable")  # in a plane, the third is the other
    ring = np.array(_ring(*lengths[axes].tolist()))
    return ring[:, np.argsort(axes)]


def _ring(width: int, height: int, depth: int) -> list[Chip]:
    """Of even lengths; the last may be 1. It climbs layer by layer, and comes back down along (0, 0, z).

    A layer of 4 × 4 chips, of which the next one is passed from 15 to 1:

        0    1    2    3
        15   6    5    4
        14   7    8    9
        13   12   11   10
    """
    row = [(x,) for x in range(1, width)]
    return [(0, 0, 0), *_there_and_back(_there_and_back(row, height), depth)]


def _there_and_back(path: Sequence[Chip], layers: int) -> list[Chip]:
    """`path` in each of so many layers, backwards in each second one, and then down to the first along the corner."""
    in_turn = itertools.islice(itertools.cycle((path, path[::-1])), layers)
    up = [(*chip, layer) for layer, chips in enumerate(in_turn) for chip in chips]
    corner = (0,) * len(path[0])
    return up + [(*corner, layer) for layer in reversed(range(1, layers))]
