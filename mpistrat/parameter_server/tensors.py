"""How arrays travel in messages: small ones in them, large ones in memory that both sides map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.host_views import view_of
from mpistrat.parameter_server.rpc.segments import Buffers, Mappings, Place, Region

# Copied through a pipe in pieces; from here on, writing the message into memory of both is quicker.
_SMALL = 1 << 13
_LINE = 64


class Kind(NamedTuple):
    """What an array is, without its numbers.

    Attributes:
        dtype: its name, such as "float32".
        of_torch: whether it is a tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    of_torch: bool

    @staticmethod
    def of(array: Array) -> Kind:
        return Kind(tuple(array.shape), arrays.dtype_name(array), arrays.is_torch(array))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def itemsize(self) -> int:
        if not self.of_torch:
            return np.dtype(self.dtype).itemsize
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    def empty(self) -> Array:
        """Such an array, without memory of its own: what others are to be like."""
        if not self.of_torch:
            return np.broadcast_to(np.empty((), self.dtype), self.shape)
        import torch

        return torch.empty((), dtype=getattr(torch, self.dtype)).expand(self.shape)

    def array_in(self, memory: np.ndarray) -> Array:
        """Bytes as such an array, in their own memory."""
        if not self.of_torch:
            return memory.view(self.dtype).reshape(self.shape)
        import torch

        return torch.from_numpy(memory).view(getattr(torch, self.dtype)).reshape(self.shape)


class Placed(NamedTuple):
    """An array in memory that both sides map."""

    place: Place
    kind: Kind


class Carried(NamedTuple):
    """An array in the message itself. A tensor would bring torch along, and not all dtypes are NumPy's."""

    data: np.ndarray  # its bytes
    kind: Kind

    def copied(self) -> Carried:
        """The same, whatever becomes of the array."""
        return Carried(self.data.copy(), self.kind)


def carried(array: Array) -> Carried:
    """`array`, on the host, as part of a message."""
    view = np.ascontiguousarray(view_of(array))
    return Carried(view.reshape(-1).view(np.uint8), Kind.of(array))


def pack(
    given: Sequence[Array], buffers: Buffers | None
) -> tuple[list[Placed | Carried], Region | None]:
    """Arrays of any device, for a message.

    Args: buffers: whose memory the receiver maps; None where it cannot.
    Returns: also the region to give back once the receiver has read it, if there is one.
    """
    on_host = [arrays.to_host(arrays.detach(array)) for array in given]
    kinds = [Kind.of(array) for array in on_host]
    rooms = [-(-kind.nbytes // _LINE) * _LINE for kind in kinds]
    if buffers is None or sum(rooms) <= _SMALL:
        return [carried(array) for array in on_host], None
    region = buffers.take(sum(rooms))
    packed: list[Placed | Carried] = []
    first = 0
    for array, kind, room in zip(on_host, kinds, rooms, strict=True):
        memory = region.memory[first : first + kind.nbytes]
        kind.array_in(memory)[...] = array
        place = region.place
        packed.append(Placed(place._replace(first=place.first + first, nbytes=kind.nbytes), kind))
        first += room
    return packed, region


def unpack(packed: Placed | Carried, mappings: Mappings) -> Array:
    """The array, in the memory in which it came."""
    if isinstance(packed, Carried):
        return packed.kind.array_in(packed.data)
    return packed.kind.array_in(mappings.at(packed.place))
