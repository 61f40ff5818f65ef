"""`IndexedSlices`: some rows of a larger array, as in `tf.IndexedSlices` and sparse gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpistrat import arrays


@dataclasses.dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Some rows of an array: row `indices[i]` of the whole array is `values[i]`.

    Args:
        values: the rows, an array of shape [rows, ...] or a list of numbers. Python floats become float32. An array is
            not copied.
        indices: the numbers of the rows in the whole array, an integer array of shape [rows] or a list. An index may
            occur more than once.
        dense_shape: the whole array's shape; None if it is not known.
    Raises: ValueError if there is not one index for each row, or if `dense_shape` has another number of dimensions than
        `values`; TypeError if `indices` are no integers.

    Example:
        >>> slices = ms.IndexedSlices(torch.tensor([[1.0, 2.0]]), [3], dense_shape=(5, 2))
        >>> slices.values, slices.indices
        (tensor([[1., 2.]]), array([3]))
    """

    values: Any
    indices: Any
    dense_shape: Any = None

    def __post_init__(self) -> None:
        values = arrays.as_operand(self.values)
        indices = arrays.as_array(self.indices)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        if indices.ndim != 1 or indices.shape != values.shape[:1]:
            raise ValueError(
                f"IndexedSlices needs one index per row: got indices of shape {list(indices.shape)} for "
                f"values of shape {list(values.shape)}"
            )
        if not arrays.is_integer(indices):
            raise TypeError(
                f"IndexedSlices needs integer indices, got {arrays.dtype_name(indices)}"
            )
        if self.dense_shape is not None and (
            not hasattr(self.dense_shape, "__len__") or len(self.dense_shape) != values.ndim
        ):
            raise ValueError(
                f"dense_shape must have one size for each of the {values.ndim} dimensions of values, got "
                f"{self.dense_shape!r:.60}"
            )
