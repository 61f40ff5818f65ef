"""Arrays in messages: small ones in the message itself, large ones in memory that both sides map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.host_views import view_of
from mpistrat.parameter_server.rpc import segments

# A pipe copies a message in pieces. From this many bytes on, shared memory is quicker.
_SMALL = 1 << 13


class TensorSpec(NamedTuple):
    """What an array is, without its numbers.

    Attributes:
        dtype: its name, such as "float32".
        is_torch: whether it is a torch tensor, or a NumPy array.
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
        size: int = self.native_dtype.itemsize
        return size

    @property
    def native_dtype(self) -> Any:
        """The dtype as an object of its library."""
        if not self.is_torch:
            return np.dtype(self.dtype)
        import torch

        return getattr(torch, self.dtype)

    def empty(self) -> Array:
        """An array of this spec without memory of its own: a prototype for others."""
        if not self.is_torch:
            return np.broadcast_to(np.empty((), self.dtype), self.shape)
        import torch

        return torch.empty((), dtype=self.native_dtype, device="cpu").expand(self.shape)

    def array_in(self, memory: np.ndarray) -> Array:
        """The bytes `memory` as an array of this spec, in place."""
        array: Array = memory
        if self.is_torch:
            import torch

            array = torch.from_numpy(memory)
        return array.view(self.native_dtype).reshape(self.shape)


class SharedTensor(NamedTuple):
    """An array in memory that both sides map."""

    handle: segments.RegionHandle
    spec: TensorSpec


class InlineTensor(NamedTuple):
    """An array in the message itself, as bytes: a tensor would need torch to be unpickled, and NumPy lacks dtypes."""

    data: np.ndarray
    spec: TensorSpec

    def copied(self) -> InlineTensor:
        """The same with data of its own, which does not change with the array."""
        return InlineTensor(self.data.copy(), self.spec)


PackedTensor = SharedTensor | InlineTensor


def inline(array: Array) -> InlineTensor:
    """`array`, on the host, as part of a message."""
    view = np.ascontiguousarray(view_of(array))
    return InlineTensor(view.reshape(-1).view(np.uint8), TensorSpec.of(array))


def pack(
    tensors: Sequence[Array], buffers: segments.Buffers | None
) -> tuple[list[PackedTensor], segments.SharedRegion | None]:
    """Arrays of any device, for a message.

    Args: buffers: memory that the receiver can map; None where it cannot.
    Returns: also the region to give back once the receiver has read it, if there is one.
    """
    on_host = [arrays.to_host(arrays.detach(array)) for array in tensors]
    specs = [TensorSpec.of(array) for array in on_host]
    rooms = [segments.whole_lines(spec.nbytes) for spec in specs]
    if buffers is None or sum(rooms) <= _SMALL:
        return [inline(array) for array in on_host], None
    region = buffers.take(sum(rooms))
    packed: list[PackedTensor] = []
    first = 0
    for array, spec, room in zip(on_host, specs, rooms, strict=True):
        part = region.part(first, spec.nbytes)
        spec.array_in(part.memory)[...] = array
        packed.append(SharedTensor(part.handle, spec))
        first += room
    return packed, region


def unpack(packed: PackedTensor, mappings: segments.Mappings) -> Array:
    """The array, in the memory in which it came."""
    if isinstance(packed, InlineTensor):
        return packed.spec.array_in(packed.data)
    return packed.spec.array_in(mappings.at(packed.handle))


def inlined(body: Any, mappings: segments.Mappings) -> Any:
    """A message's body with InlineTensors in place of SharedTensors, for a receiver that cannot map these."""
    if isinstance(body, SharedTensor):
        return inline(unpack(body, mappings))
    if isinstance(body, list):
        return [inlined(item, mappings) for item in body]
    if isinstance(body, tuple):
        items = [inlined(item, mappings) for item in body]
        return type(body)(*items) if hasattr(body, "_fields") else tuple(items)
    return body
