"""Sparse rows of an array, as `tf.IndexedSlices` and sparse gradients have them."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows `values[i]` at positions `indices[i]` of an array of shape `dense_shape`.

    Args:
        values: array of shape [rows, ...].
        indices: integer array of shape [rows]; an index may occur more than once.
        dense_shape: the whole array's shape, if known.
    """

    values: Any
    indices: Any
    dense_shape: Any = None

    def __post_init__(self) -> None:
        if getattr(self.indices, "ndim", 1) != 1 or len(self.indices) != len(self.values):
            raise ValueError(
                "IndexedSlices needs one index per row: got indices of shape "
                f"{tuple(getattr(self.indices, 'shape', ()))} for values of shape "
                f"{tuple(getattr(self.values, 'shape', ()))}"
            )
