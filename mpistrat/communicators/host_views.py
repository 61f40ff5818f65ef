"""Host buffers of any library as NumPy arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_torch, numpy_knows


def view_of(buffer: Array) -> np.ndarray:
    """`buffer`'s own memory as a NumPy array; dtypes that NumPy lacks appear as unsigned integers."""
    if isinstance(buffer.dtype, np.dtype):
        return buffer
    tensor = buffer.detach() if buffer.requires_grad else buffer
    integer = _integer_of_size(tensor.dtype)
    return (tensor if integer is None else tensor.view(integer)).numpy()


@functools.cache
def _integer_of_size(dtype: Any) -> Any:
    """Torch's integers of the size of a dtype that NumPy lacks; None for other dtypes."""
    if numpy_knows(dtype):
        return None
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]


def as_buffer_of(buffer: Array, view: np.ndarray) -> Array:
    """The inverse of `view_of`: a NumPy array as an array of `buffer`'s library and dtype."""
    if is_torch(buffer):
        import torch

        return torch.from_numpy(view).view(buffer.dtype)
    return view


def room_for(buffer: Array, shapes: np.ndarray) -> list[np.ndarray]:
    """Uninitialized arrays like `view_of(buffer)`, each of the shape in a row of `shapes`; (1,) is that of a scalar."""
    dtype = view_of(buffer).dtype
    return [np.empty(tuple(shape) if buffer.ndim else (), dtype) for shape in shapes]


def parts_with_own(buffer: Array, out: Array, rank: int, size: int) -> list[np.ndarray]:
    """The bytes of each rank's part of `out`, after `buffer`, which may be there already, was put into this rank's."""
    parts = list(bytes_of(out).reshape(size, -1))
    source = bytes_of(buffer)
    if address_of(source) != address_of(parts[rank]):
        parts[rank][:] = source
    return parts


def address_of(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])


def bytes_of(buffer: Array) -> np.ndarray:
    """The memory of `buffer` as bytes. Raises: ValueError when it is not C-contiguous."""
    view = buffer if buffer.__class__ is np.ndarray else view_of(buffer)
    if not view.flags.c_contiguous:
        raise ValueError(
            f"expected a C-contiguous buffer, got one of shape {view.shape} with strides {view.strides}; copy it first"
        )
    return view.reshape(-1).view(np.uint8)
