"""Host memory for results: fresh pages cost as much as the reduction that fills them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array

SMALLEST = 1 << 16  # bytes; the allocators recycle smaller memory themselves


def _references(buffers: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(buffers[index])


# References to a buffer that nothing but this module uses. Their number depends on the interpreter's version.
_OWN_REFERENCES = _references([np.empty(0)], 0)


class RecycledBuffers:
    """Hands out uninitialized arrays; their memory is used again once nothing refers to it.

    Args:
        kept: how many buffers to keep; the largest idle memory is that of the last `kept` results.
        buffers: the first that it hands out. Nothing else may refer to them.
    """

    def __init__(self, kept: int = 4, buffers: Sequence[np.ndarray] = ()) -> None:
        self._kept, self._buffers = kept, list(buffers)

    def free(self, nbytes: int) -> np.ndarray | None:
        """The first `nbytes` of a buffer that is as large and that nothing refers to; None if there is none."""
        index = self._idle(nbytes, math.inf)
        return None if index is None else self._buffers[index][:nbytes]

    def are_idle(self) -> bool:
        """Whether nothing refers to any of the buffers."""
        return all(map(self._is_idle, range(len(self._buffers))))

    def like(self, array: Array) -> Array:
        """An array of the shape and dtype of `array`, a C-contiguous NumPy array or CPU tensor."""
        if array.nbytes >= SMALLEST:
            return self.empty(array.shape, array.dtype)
        if isinstance(array, np.ndarray):
            return np.empty_like(array)
        return sys.modules["torch"].empty_like(array)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """A C-contiguous NumPy array, or a CPU tensor, whose dtype it is."""
        nbytes = math.prod(shape) * dtype.itemsize
        if isinstance(dtype, np.dtype):
            if nbytes < SMALLEST:
                return np.empty(shape, dtype)
            return self._take(nbytes).view(dtype).reshape(shape)
        import torch

        if nbytes < SMALLEST:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._take(nbytes)).view(dtype).view(shape)

    def _take(self, nbytes: int) -> np.ndarray:
        """A buffer of exactly `nbytes` that no array shares; arrays made of it keep it in use."""
        index = self._idle(nbytes, nbytes)
        if index is None:
            index, self._buffers = 0, [np.empty(nbytes, np.uint8), *self._buffers][: self._kept]
        return self._buffers[index]

    def _idle(self, least: int, most: float) -> int | None:
        """The index of the first idle buffer of `least` to `most` bytes."""
        for i in range(len(self._buffers)):
            if least <= self._buffers[i].nbytes <= most and self._is_idle(i):
                return i
        return None

    def _is_idle(self, index: int) -> bool:
        return _references(self._buffers, index) == _OWN_REFERENCES
