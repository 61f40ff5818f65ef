"""How arrays travel in messages: small ones in them, large ones in memory that both sides map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.host_views import view_of
from mpistrat.parameter_server.rpc.segments import Buffers, Mappings, Region, RegionHandle

# Copied through a pipe in pieces; from here on, writing the message into memory of both is quicker.
_SMALL = 1 << 13
_LINE = 64


class TensorSpec(NamedTuple):
    """What an array is, without its numbers.

    Attributes:
        dtype: its name, such as "float32".
        is_torch: whether it is a tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    is_torch: bool

    @staticmethod
    def of(array: Array) -> TensorSpec:
        return TensorSpec(tuple(array.shape), arrays.dtype_name(array), arrays.is_torch(array))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def itemsize(self) -> int:
        if not self.is_torch:
            return np.dtype(self.dtype).itemsize
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    def empty(self) -> Array:
        """Such an array, without memory of its own: what others are to be like."""
        if not self.is_torch:
            return np.broadcast_to(np.empty((), self.dtype), self.shape)
        import torch

        return torch.empty((), dtype=getattr(torch, self.dtype)).expand(self.shape)

    def array_in(self, memory: np.ndarray) -> Array:
        """Bytes as such an array, in their own memory."""
        if not self.is_torch:
            return memory.view(self.dtype).reshape(self.shape)
        import torch

        return torch.from_numpy(memory).view(getattr(torch, self.dtype)).reshape(self.shape)


class SharedTensor(NamedTuple):
    """An array in memory that both sides map."""

    handle: RegionHandle
    spec: TensorSpec


class InlineTensor(NamedTuple):
    """An array in the message itself. A tensor would bring torch along, and not all dtypes are NumPy's."""

    data: np.ndarray  # its bytes
    spec: TensorSpec

    def copied(self) -> InlineTensor:
        """The same, whatever becomes of the array."""
        return InlineTensor(self.data.copy(), self.spec)


def inline(array: Array) -> InlineTensor:
    """`array`, on the host, as part of a message."""
    view = np.ascontiguousarray(view_of(array))
    return InlineTensor(view.reshape(-1).view(np.uint8), TensorSpec.of(array))


def pack(
    given: Sequence[Array], buffers: Buffers | None
) -> tuple[list[SharedTensor | InlineTensor], Region | None]:
    """Arrays of any device, for a message.

    Args: buffers: whose memory the receiver maps; None where it cannot.
    Returns: also the region to give back once the receiver has read it, if there is one.
    """
    on_host = [arrays.to_host(arrays.detach(array)) for array in given]
    specs = [TensorSpec.of(array) for array in on_host]
    rooms = [-(-spec.nbytes // _LINE) * _LINE for spec in specs]
    if buffers is None or sum(rooms) <= _SMALL:
        return [inline(array) for array in on_host], None
    region = buffers.take(sum(rooms))
    packed: list[SharedTensor | InlineTensor] = []
    first = 0
    for array, spec, room in zip(on_host, specs, rooms, strict=True):
        memory = region.memory[first : first + spec.nbytes]
        spec.array_in(memory)[...] = array
        handle = region.handle
        packed.append(
            SharedTensor(handle._replace(first=handle.first + first, nbytes=spec.nbytes), spec)
        )
        first += room
    return packed, region


def unpack(packed: SharedTensor | InlineTensor, mappings: Mappings) -> Array:
    """The array, in the memory in which it came."""
    if isinstance(packed, InlineTensor):
        return packed.spec.array_in(packed.data)
    return packed.spec.array_in(mappings.at(packed.handle))
