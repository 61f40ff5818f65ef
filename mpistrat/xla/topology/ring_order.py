"""Orders of the chips of a box, in which each is linked with the next."""

from __future__ import annotations

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
    long = [length for length in shape if length > 1]
    if len(long) < 2 or any(length % 2 for length in long):
        z, y, x = np.indices(tuple(reversed(shape))).reshape(3, -1)
        return np.stack([x, y, z], axis=-1)
    axes = sorted(range(3), key=lambda axis: shape[axis] == 1)  # in a plane, the third is the other
    ring = np.array(_ring([shape[axis] for axis in axes]))
    return ring[:, np.argsort(axes)]


def _ring(shape: Sequence[int]) -> list[Chip]:
    """Of even lengths; the last may be 1. It climbs layer by layer, and comes back down along (0, 0, z).

    A layer of 4 × 4 chips, of which the next one is passed from 15 to 1:

        0    1    2    3
        15   6    5    4
        14   7    8    9
        13   12   11   10
    """
    width, height, depth = shape
    layer: list[tuple[int, int]] = []
    for y in range(height):
        row = [(x, y) for x in range(1, width)]
        layer += row if y % 2 == 0 else row[::-1]
    layer += [(0, y) for y in reversed(range(1, height))]
    ring: list[Chip] = [(0, 0, 0)]
    for z in range(depth):
        ring += [(x, y, z) for x, y in (layer if z % 2 == 0 else layer[::-1])]
    return ring + [(0, 0, z) for z in reversed(range(1, depth))]
