"""Turns a program's tensors into contiguous buffers that a communicator can send and receive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpistrat.communicators.recycled_buffers import RecycledBuffers

Tensors = Sequence[Tensor]


@contextlib.contextmanager
def written(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a contiguous buffer with the elements of `tensor`, for a call that writes it inside the block.

    The buffer is the tensor's own memory if that is contiguous. Else it is a copy, and its contents are copied back to
    `tensor` after the block, unless the block raises.
    """
    detached = tensor.detach()
    buffer = _plain(detached)
    yield buffer
    if buffer is not detached:
        detached.copy_(buffer)


def read(tensor: Tensor) -> Tensor:
    """Return a contiguous buffer with the elements of `tensor`, to be read: its own memory if contiguous, or a copy."""
    return _plain(tensor.detach())


def apart(buffer: Tensor, written: Tensor) -> Tensor:
    """Return `buffer` itself, or a copy of it if it overlaps the memory of `written`. The caller only reads the result.

    MPI forbids buffers that overlap in one call.
    """
    first = buffer.data_ptr()
    other = written.data_ptr()
    overlap = first < other + written.nbytes and other < first + buffer.nbytes
    return buffer.clone() if overlap else buffer


def unwritten(tensors: Tensors, outs: Sequence[Tensors]) -> list[Tensor]:
    """Return the inputs of several calls, so that no call overwrites the input of a later call.

    An input is copied if its storage is the storage of an earlier call's output. The other inputs are returned as they
    are.
    Args:
        tensors: the input of each call, in the order of calls.
        outs: the outputs of each call.
    """
    storages: set[int] = set()
    kept = []
    for tensor, results in zip(tensors, outs, strict=True):
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        kept.append(tensor)
        storages.update(out.untyped_storage().data_ptr() for out in results)
    return kept


def room_for(tensor: Tensor) -> Tensor:
    """Return a contiguous buffer of the shape and dtype of `tensor`, for the caller to receive data in.

    Returns: `tensor` itself (detached) if it is contiguous. Else new memory with undefined values, not a copy; the
        caller copies it to `tensor` after the receive.
    """
    detached = tensor.detach()
    if is_plain(detached):
        return detached
    return torch.empty_like(detached, memory_format=torch.contiguous_format)


def _plain(tensor: Tensor) -> Tensor:
    if is_plain(tensor):
        return tensor
    return tensor.contiguous().resolve_conj().resolve_neg()


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its elements in order. False for a transposed, conjugated or negated view."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def by_dtype(tensors: Tensors) -> list[list[Tensor]]:
    """Return a list of tensors for each dtype, in the order of the first tensor of each dtype."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.dtype, []).append(tensor)
    return list(alike.values())


def lengths(tensors: Tensors) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def flat(tensors: Tensors, buffers: RecycledBuffers) -> Tensor:
    """Return a flat buffer with the elements of all `tensors`, one after the other.

    Args:
        tensors: tensors of one dtype, at least one.
        buffers: memory that is used again for later buffers, once nobody refers to this one.
    """
    flattened = [tensor.detach().reshape(-1) for tensor in tensors]
    buffer = buffers.empty((sum(lengths(tensors)),), tensors[0].dtype)
    return torch.cat(flattened, out=buffer)


def unflatten(buffer: Tensor, tensors: Tensors) -> None:
    """Copy the elements of `buffer`, in the order of `flat(tensors)`, into `tensors`."""
    for tensor, part in zip(tensors, buffer.split(lengths(tensors)), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
