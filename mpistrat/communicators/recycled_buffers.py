"""Host memory for results: fresh pages cost as much as the reduction that fills them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array

SMALLEST = 1 << 16  # bytes; the allocators recycle smaller memory themselves


# References to a buffer that nothing but this module uses. Their number depends on the interpreter's version.
_buffers = [np.empty(0)]
_OWN_REFERENCES = sys.getrefcount(_buffers[0])


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

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """A C-contiguous NumPy array, or a CPU tensor, whose dtype it is. Arrays made of it keep its memory in use."""
        nbytes, of_numpy = math.prod(shape) * dtype.itemsize, isinstance(dtype, np.dtype)
        if nbytes < SMALLEST:
            if of_numpy:
                return np.empty(shape, dtype)
            return sys.modules["torch"].empty(shape, dtype=dtype, device="cpu")
        index = self._idle(nbytes, nbytes)
        if index is None:
            index, self._buffers = 0, [np.empty(nbytes, np.uint8), *self._buffers][: self._kept]
        memory = self._buffers[index]
        if of_numpy:
            return memory.view(dtype).reshape(shape)
        return sys.modules["torch"].from_numpy(memory).view(dtype).view(shape)

    def _idle(self, least: int, most: float) -> int | None:
        """The index of the first of `least` to `most` bytes that nothing refers to."""
        for i in range(len(self._buffers)):
            if least <= self._buffers[i].nbytes <= most and self._is_idle(i):
                return i
        return None

    def _is_idle(self, index: int) -> bool:
        return sys.getrefcount(self._buffers[index]) == _OWN_REFERENCES
