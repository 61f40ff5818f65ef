"""Tensors of a program as buffers of a communicator: contiguous, and of dtypes that can be combined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpistrat.communicators.recycled_buffers import RecycledBuffers

Tensors = Sequence[Tensor]


@contextlib.contextmanager
def written(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous buffer with the elements of `tensor`; what the block writes into it is in `tensor` afterwards."""
    detached = tensor.detach()
    buffer = _plain(detached)
    yield buffer
    if buffer is not detached:
        detached.copy_(buffer)


def read(tensor: Tensor) -> Tensor:
    """A contiguous buffer with the elements of `tensor`, to read: the tensor's own memory where that is contiguous."""
    return _plain(tensor.detach())


def apart(buffer: Tensor, written: Tensor) -> Tensor:
    """`buffer`, to read; a copy where it has memory in common with another buffer, `written`, as MPI forbids."""
    first, other = buffer.data_ptr(), written.data_ptr()
    overlap = first < other + written.nbytes and other < first + buffer.nbytes
    return buffer.clone() if overlap else buffer


def unwritten(tensors: Tensors, outs: Sequence[Tensors]) -> list[Tensor]:
    """The inputs of calls that are made one after another; copies of inputs that `outs` of earlier calls may overwrite.

    Args: outs: of each call.
    """
    storages: set[int] = set()
    kept = []
    for tensor, results in zip(tensors, outs, strict=True):
        kept.append(tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor)
        storages.update(out.untyped_storage().data_ptr() for out in results)
    return kept


def room_for(tensor: Tensor) -> Tensor:
    """A contiguous buffer for other elements of `tensor`: its own memory, or else new."""
    detached = tensor.detach()
    if is_plain(detached):
        return detached
    return torch.empty_like(detached, memory_format=torch.contiguous_format)


def _plain(tensor: Tensor) -> Tensor:
    return tensor if is_plain(tensor) else tensor.contiguous().resolve_conj().resolve_neg()


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory holds its elements in order, as that of a transposed or conjugated view does not."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def by_dtype(tensors: Tensors) -> list[list[Tensor]]:
    """The tensors of each dtype, in the order in which the dtypes come."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.dtype, []).append(tensor)
    return list(alike.values())


def lengths(tensors: Tensors) -> list[int]:
    """How many elements each has."""
    return [tensor.numel() for tensor in tensors]


def flat(tensors: Tensors, buffers: RecycledBuffers) -> Tensor:
    """The elements of all, which have one dtype, one after the other, in one of `buffers`."""
    flattened = [tensor.detach().reshape(-1) for tensor in tensors]
    buffer = buffers.empty((sum(lengths(tensors)),), tensors[0].dtype)
    return torch.cat(flattened, out=buffer)


def unflatten(buffer: Tensor, tensors: Tensors) -> None:
    """Copy what `flat` put one after the other into `tensors`."""
    for tensor, part in zip(tensors, buffer.split(lengths(tensors)), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
