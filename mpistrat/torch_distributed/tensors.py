"""Turns a program's tensors into buffers of a communicator: contiguous, and of dtypes that can be combined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpistrat.communicators.recycled_buffers import RecycledBuffers

Tensors = Sequence[Tensor]


@contextlib.contextmanager
def written(tensor: Tensor) -> Iterator[Tensor]:
    """Give a contiguous buffer with the elements of `tensor`. After the block the buffer's contents are in `tensor`.

    The buffer is the tensor's own memory if that is contiguous.
    """
    detached = tensor.detach()
    buffer = _plain(detached)
    yield buffer
    if buffer is not detached:
        detached.copy_(buffer)


def read(tensor: Tensor) -> Tensor:
    """Return a contiguous buffer with the elements of `tensor`, for reading: its own memory if that is contiguous."""
    return _plain(tensor.detach())


def apart(buffer: Tensor, written: Tensor) -> Tensor:
    """Return `buffer`, for reading, or a copy of it if it overlaps the memory of `written`.

    MPI forbids overlapping buffers in one call.
    """
    first, other = buffer.data_ptr(), written.data_ptr()
    overlap = first < other + written.nbytes and other < first + buffer.nbytes
    return buffer.clone() if overlap else buffer


def unwritten(tensors: Tensors, outs: Sequence[Tensors]) -> list[Tensor]:
    """Return the inputs of calls that follow each other, with copies of inputs that an earlier call overwrites.

    Args:
        tensors: the input of each call.
        outs: the outputs of each call.
    """
    storages: set[int] = set()
    kept = []
    for tensor, results in zip(tensors, outs, strict=True):
        kept.append(tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor)
        storages.update(out.untyped_storage().data_ptr() for out in results)
    return kept


def room_for(tensor: Tensor) -> Tensor:
    """Return a contiguous buffer of the shape of `tensor`, for other contents: its own memory, or new memory."""
    detached = tensor.detach()
    if is_plain(detached):
        return detached
    return torch.empty_like(detached, memory_format=torch.contiguous_format)


def _plain(tensor: Tensor) -> Tensor:
    return tensor if is_plain(tensor) else tensor.contiguous().resolve_conj().resolve_neg()


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its elements in order. A transposed or conjugated view does not."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def by_dtype(tensors: Tensors) -> list[list[Tensor]]:
    """Return the tensors of each dtype. The dtypes are in the order of their first tensors."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.dtype, []).append(tensor)
    return list(alike.values())


def lengths(tensors: Tensors) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def flat(tensors: Tensors, buffers: RecycledBuffers) -> Tensor:
    """Copy the elements of `tensors`, of one dtype, one after the other, into one of `buffers`, and return it."""
    flattened = [tensor.detach().reshape(-1) for tensor in tensors]
    buffer = buffers.empty((sum(lengths(tensors)),), tensors[0].dtype)
    return torch.cat(flattened, out=buffer)


def unflatten(buffer: Tensor, tensors: Tensors) -> None:
    """Copy the elements of `buffer`, in the order of `flat`, into `tensors`."""
    for tensor, part in zip(tensors, buffer.split(lengths(tensors)), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
