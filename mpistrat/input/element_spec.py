"""Describes the elements of a distributed dataset."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array. A dimension that varies is None.

    Attributes:
        shape: one size, or None, for each dimension.
        dtype: a name such as "float32" or "bfloat16"; "str" for text of any length.
        library: "numpy", "torch" or "cupy".

    Example:
        >>> ms.input.ArraySpec.of(np.ones((4, 3)))
        ArraySpec(shape=(4, 3), dtype='float64', library='numpy')
        >>> spec = ms.input.ArraySpec((None, 3), "float32", library="torch")
        >>> spec.with_batch(32).shape, spec.empty().shape
        ((32, 3), torch.Size([0, 3]))
    """

    shape: tuple[int | None, ...]
    dtype: str
    library: str = "numpy"

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        """Return the spec of a NumPy, torch or CuPy array, with the array's sizes. The dtype of any text is "str"."""
        library = "numpy"
        dtype = arrays.dtype_name(array)
        if arrays.is_torch(array):
            library = "torch"
        elif arrays.is_cupy(array):
            library = "cupy"
        elif array.dtype.kind in "US":
            dtype = "str"
        return cls(tuple(array.shape), dtype, library)

    def with_batch(self, size: int | None) -> ArraySpec:
        """Return the spec with first dimension `size`; a scalar's spec stays as it is."""
        if not self.shape:
            return self
        return replace(self, shape=(size, *self.shape[1:]))

    def empty(self) -> Array:
        """Return an array of no examples, for torch on the host. Other dimensions that vary are 0, too."""
        shape = tuple(size or 0 for size in self.with_batch(0).shape)
        if self.library == "torch":
            import torch

            return torch.zeros(shape, dtype=getattr(torch, self.dtype), device="cpu")
        return importlib.import_module(self.library).zeros(shape, self.dtype)


@dataclass(frozen=True)
class PerReplicaSpec:
    """The spec of a distributed value.

    Attributes:
        specs: one spec for each replica of this rank.

    Example:
        >>> spec = ms.input.PerReplicaSpec((ms.input.ArraySpec((None,), "int64"),) * 2)
        >>> len(spec.specs)
        2
    """

    specs: tuple[Any, ...]
