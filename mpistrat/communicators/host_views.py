"""NumPy views of buffers in host memory: NumPy arrays and CPU tensors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_torch, numpy_knows, unmasked


def view_of(buffer: Array) -> np.ndarray:
    """Return a NumPy array in `buffer`'s own memory; if NumPy lacks the dtype, as integers of the same size."""
    if isinstance(buffer.dtype, np.dtype):
        return unmasked(buffer)
    tensor = buffer.detach() if buffer.requires_grad else buffer
    integer = _integer_of_size(tensor.dtype)
    if integer is not None:
        tensor = tensor.view(integer)
    return tensor.numpy()


@functools.cache
def _integer_of_size(dtype: Any) -> Any:
    """Return torch's integer dtype of the same size as `dtype` if NumPy lacks `dtype`; else None."""
    if numpy_knows(dtype):
        return None
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]


def as_buffer_of(buffer: Array, view: np.ndarray) -> Array:
    """Return `view` as an array of `buffer`'s library and dtype, in the same memory: the inverse of `view_of`."""
    if is_torch(buffer):
        import torch

        return torch.from_numpy(view).view(buffer.dtype)
    return view


def room_for(buffer: Array, shapes: np.ndarray) -> list[np.ndarray]:
    """Return uninitialized arrays of the dtype of `view_of(buffer)`, one for each rank, for `all_gather`.

    Args: shapes: an integer array with each rank's shape in a row. If `buffer` is a scalar, all arrays are scalars, and
        the rows do not count.
    """
    dtype = view_of(buffer).dtype
    return [np.empty(tuple(shape) if buffer.ndim else (), dtype) for shape in shapes]


def parts_with_own(buffer: Array, out: Array, rank: int, size: int) -> list[np.ndarray]:
    """Copy `buffer` into this rank's part of `out`, unless it is there already.

    Returns: `size` arrays of bytes (uint8), in rank order: views of the ranks' parts of `out`.
    """
    parts = list(bytes_of(out).reshape(size, -1))
    source = bytes_of(buffer)
    if address_of(source) != address_of(parts[rank]):
        parts[rank][:] = source
    return parts


def address_of(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])


def bytes_of(buffer: Array) -> np.ndarray:
    """Return a flat view of `buffer`'s memory as bytes. Raises: ValueError if `buffer` is not C-contiguous."""
    view = buffer if buffer.__class__ is np.ndarray else view_of(buffer)
    if not view.flags.c_contiguous:
        raise ValueError(
            f"expected a C-contiguous buffer, got one of shape {view.shape} with strides {view.strides}; copy it first"
        )
    return view.reshape(-1).view(np.uint8)
