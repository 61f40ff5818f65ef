"""Recycles host memory for results: to get new pages from the system takes as long as the reduction itself."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array

SMALLEST = 1 << 16  # bytes; allocators recycle smaller memory themselves


# The reference count of a buffer that only a list of this module refers to. It depends on the version of Python.
_buffers = [np.empty(0)]
_OWN_REFERENCES = sys.getrefcount(_buffers[0])


class RecycledBuffers:
    """Hands out uninitialized arrays, and uses the memory of an array again once nothing refers to it.

    Args:
        kept: how many buffers `empty` keeps, the newest; an array that is still in use keeps its own memory.
        buffers: flat arrays of bytes to hand out first. Nothing else may refer to them.
    """

    def __init__(self, kept: int = 4, buffers: Sequence[np.ndarray] = ()) -> None:
        self._kept = kept
        self._buffers = list(buffers)

    def free(self, nbytes: int) -> np.ndarray | None:
        """Return the first `nbytes` bytes of a large enough buffer that nothing uses; None if there is none."""
        index = self._idle(nbytes, math.inf)
        return None if index is None else self._buffers[index][:nbytes]

    def are_idle(self) -> bool:
        """Whether nothing outside this object refers to any of the buffers."""
        return all(self._is_idle(index) for index in range(len(self._buffers)))

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return an uninitialized C-contiguous array on the host. Its memory is in use while the array or a view lives.

        Returns: a NumPy array for a NumPy dtype, a CPU tensor for a torch dtype.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        of_numpy = isinstance(dtype, np.dtype)
        if nbytes < SMALLEST:
            if of_numpy:
                return np.empty(shape, dtype)
            return sys.modules["torch"].empty(shape, dtype=dtype, device="cpu")
        index = self._idle(nbytes, nbytes)
        if index is None:
            added = np.empty(nbytes, np.uint8)
            self._buffers = [added, *self._buffers][: self._kept]
            index = 0
        memory = self._buffers[index]
        if of_numpy:
            return memory.view(dtype).reshape(shape)
        return sys.modules["torch"].from_numpy(memory).view(dtype).view(shape)

    def _idle(self, least: int, most: float) -> int | None:
        """Return the index of the first buffer of `least` to `most` bytes that nothing uses; None if there is none."""
        for i in range(len(self._buffers)):
            if least <= self._buffers[i].nbytes <= most and self._is_idle(i):
                return i
        return None

    def _is_idle(self, index: int) -> bool:
        return sys.getrefcount(self._buffers[index]) == _OWN_REFERENCES
