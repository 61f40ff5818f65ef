"""What the elements of a distributed dataset look like."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from mpistrat import arrays
from mpistrat.arrays import Array


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array; a dimension that varies is None.

    Attributes:
        dtype: "float32", "bfloat16"; "str" for text of any length.
        library: "numpy", "torch" or "cupy".
    """

    shape: tuple[int | None, ...]
    dtype: str
    library: str = "numpy"

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        library = (
            "torch" if arrays.is_torch(array) else "cupy" if arrays.is_cupy(array) else "numpy"
        )
        text = library == "numpy" and array.dtype.kind in "US"
        return cls(tuple(array.shape), "str" if text else arrays.dtype_name(array), library)

    def with_batch(self, size: int | None) -> ArraySpec:
        """With another first dimension; a scalar stays one."""
        return replace(self, shape=(size, *self.shape[1:])[: len(self.shape)])

    def empty(self) -> Array:
        """An array of no examples; other dimensions that vary are 0 too."""
        shape = tuple(size or 0 for size in self.with_batch(0).shape)
        if self.library == "torch":
            import torch

            return torch.zeros(shape, dtype=getattr(torch, self.dtype), device="cpu")
        return importlib.import_module(self.library).zeros(shape, self.dtype)


@dataclass(frozen=True)
class PerReplicaSpec:
    """The specs of a distributed value: one for each replica of this rank."""

    specs: tuple[Any, ...]
