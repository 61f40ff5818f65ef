"""Orders the chips of a box, as a ring of linked chips if the box has one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Chip = tuple[int, ...]


def ring_order(shape: Sequence[int]) -> NDArray[np.int64]:
    """Return the chips of a box in the order of a ring, or sorted by z, then y, then x.

    The ring begins at (0, 0, 0); each chip is a neighbour of the next chip, and the last chip of the first. The chips
    are sorted if the box has an odd length above 1, or is one line of chips. (Only a torus links the ends of a line.)

    Args: shape: number of chips along x, y and z.
    Returns: integers of shape [chips, 3]; the last axis is (x, y, z).
    """
    lengths = np.asarray(shape)
    long = lengths[lengths > 1]
    if len(long) < 2 or (long % 2).any():
        z, y, x = np.indices(tuple(reversed(shape))).reshape(3, -1)
        return np.stack([x, y, z], axis=-1)
    axes = np.argsort(lengths == 1, kind="stable")  # in a plane, the axis of length 1 comes last
    ring = np.array(_ring(*lengths[axes].tolist()))
    return ring[:, np.argsort(axes)]


def _ring(width: int, height: int, depth: int) -> list[Chip]:
    """Return the chips (x, y, z) of a box of even lengths (`depth` may be 1) as a ring that begins at (0, 0, 0).

    The ring goes through the layers z = 0, 1, … and returns along the chips (0, 0, z). The picture shows the order of
    the chips in layer 0 of 4 × 4 chips; the next layer has them backwards, from 15 to 1:

        0    1    2    3
        15   6    5    4
        14   7    8    9
        13   12   11   10
    """
    row = [(x,) for x in range(1, width)]
    return [(0, 0, 0), *_there_and_back(_there_and_back(row, height), depth)]


def _there_and_back(path: Sequence[Chip], layers: int) -> list[Chip]:
    """Return the chips of `path` in each layer, each with its layer's number as one more coordinate.

    Every second layer is passed backwards. Then come the chips at coordinates 0, from the last layer down to layer 1.
    """
    in_turn = itertools.islice(itertools.cycle((path, path[::-1])), layers)
    up = [(*chip, layer) for layer, chips in enumerate(in_turn) for chip in chips]
    corner = (0,) * len(path[0])
    return up + [(*corner, layer) for layer in reversed(range(1, layers))]
