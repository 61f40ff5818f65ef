"""Tensors of a program as buffers of a communicator: contiguous, and of dtypes that can be combined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def written(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A contiguous buffer with the elements of `tensor`; what the block writes into it is in `tensor` afterwards."""
    own = tensor.detach()
    if own.is_contiguous():
        yield own
        return
    buffer = own.contiguous()
    yield buffer
    own.copy_(buffer)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous buffer with the elements of `tensor`, to read: the tensor's own memory where that is contiguous."""
    return tensor.detach().contiguous()


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all, one after the other, in a buffer of one dimension."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what `flat` put one after the other into `tensors`."""
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, buffer.split(sizes), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
