"""Torch parameters and buffers on servers: where they are, and how their values get there and back.

Two ranks that have the same tensor name it by its place on the servers, in a key.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.parameter_server.client.client import Change, Client
from mpistrat.parameter_server.protocol.messages import Address, GradientMethod
from mpistrat.pytorch.modules.registry import BufferSlot, Registry, version

# Of a tensor's parts, in order: the server's rank, and the array's number there.
Places = tuple[tuple[int, int], ...]
PARAMETER, ROWS, BUFFER = "parameter", "rows of a parameter", "buffer"
# All that the other rank needs to find its tensor, or to make it: the kind, the places, the device, `requires_grad`.
TensorKey = tuple[str, Places, str, bool]


@dataclasses.dataclass(eq=False)
class RemoteTensor:
    """One parameter or buffer on the servers.

    Attributes:
        owns: whether this rank's values are everybody's where it writes the tensor outside optimizers' steps.
        addresses: of its parts, which are its rows in order; one of all of it, if it is not split.
        version: of the tensor when it last was equal to what the servers have.
        rows_only: whether the values are on the servers alone, and ranks pull the rows that they need.
    """

    client: Client
    owns: bool
    addresses: Sequence[Address]
    version: int
    rows_only: bool = False

    @property
    def split(self) -> bool:
        return len(self.addresses) > 1

    @property
    def rows(self) -> list[int]:
        """How many each part has."""
        return [address.spec.shape[0] for address in self.addresses]

    def pieces(self, tensor: torch.Tensor) -> list[tuple[Address, torch.Tensor]]:
        """What `tensor`, of the same shape, has for each part."""
        if not self.split:
            return [(self.addresses[0], tensor)]
        return list(zip(self.addresses, tensor.split(self.rows), strict=True))

    def changes(self, method: str | GradientMethod, operand: torch.Tensor) -> list[Change]:
        """The update `method`, such as "assign" or an optimizer's step, by an `operand` of the same shape."""
        return [Change(address, method, piece) for address, piece in self.pieces(operand)]

    def by_part(self, indices: torch.Tensor) -> list[tuple[Address, int, slice]]:
        """For each part its first row, and which of the ascending `indices` of rows are in it."""
        bounds = [*itertools.accumulate(self.rows, initial=0)]
        cuts = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
        slices = map(slice, cuts[:-1], cuts[1:])
        return [*zip(self.addresses, bounds[:-1], slices, strict=True)]

    def pull_rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Args: indices: of rows, ascending. Raises: IndexError."""
        count = sum(self.rows)
        for row in (*indices[:1].tolist(), *indices[-1:].tolist()):
            if not 0 <= row < count:
                raise IndexError(f"row {row} of an embedding of {count} rows")
        parts = [
            self.client.rows(address, (indices[part] - first).cpu().numpy())
            for address, first, part in self.by_part(indices)
            if part.start < part.stop or not self.split
        ]
        if not parts:
            return self.pull_rows(indices.new_zeros(1))[:0]
        return torch.cat(parts).to(indices.device)

    def pull(self, like: torch.Tensor) -> torch.Tensor:
        """All of it, on the device of `like`."""
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self.client.pull_into(self.pieces(out))
        return out

    def assign(self, value: torch.Tensor) -> None:
        """Send `value`, if this rank owns that."""
        if self.owns:
            self.client.change(self.changes("assign", value.detach()))


Held = tuple[RemoteTensor, torch.Tensor]  # and this rank's copy, detached


class _PulledBuffer(NamedTuple):
    """A buffer as a run began with it."""

    remote: RemoteTensor
    slot: BufferSlot
    tensor: torch.Tensor
    before: torch.Tensor


class RemoteTensors:
    """The tensors that one strategy has on servers. Args: owns: as of `RemoteTensor`."""

    def __init__(self, client: Client, owns: bool) -> None:
        self.client, self.owns = client, owns
        self._remote: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._pulled: list[_PulledBuffer] = []
        self._by_place: weakref.WeakValueDictionary[Places, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def __contains__(self, tensor: torch.Tensor | None) -> bool:
        return tensor in self._remote

    def __getitem__(self, tensor: torch.Tensor) -> RemoteTensor:
        remote: RemoteTensor = self._remote[tensor]
        return remote

    def add(self, tensor: torch.Tensor, addresses: Sequence[Address]) -> RemoteTensor:
        """The servers have at `addresses` what `tensor` is now, or has to become."""
        remote = RemoteTensor(self.client, self.owns, addresses, version(tensor))
        self._remote[tensor] = remote
        return remote

    def key_of(self, value: Any) -> TensorKey | None:
        """The key by which other ranks find the tensor, too; None for other values."""
        if not isinstance(value, torch.Tensor) or value not in self:
            return None
        remote = self[value]
        places = tuple((address.server, address.key) for address in remote.addresses)
        self._by_place[places] = value
        kind = BUFFER
        if isinstance(value, torch.nn.Parameter):
            kind = ROWS if remote.rows_only else PARAMETER
        return kind, places, value.device.type, value.requires_grad

    def find(self, key: TensorKey) -> torch.Tensor:
        """This rank's tensor, for which `key_of` gave this key."""
        return self._by_place[key[1]]

    def held(self, tensors: Iterable[torch.Tensor | None]) -> list[Held]:
        """Those that are on servers, and whose values are here, too."""
        return [
            (self[tensor], tensor.detach())
            for tensor in tensors
            if tensor is not None and tensor in self and not self[tensor].rows_only
        ]

    def sync(self, held: Sequence[Held]) -> None:
        """Send what this rank has written, if it owns that; then let `held` be what the servers have."""
        if self.owns:
            self.send_written(held)
        self.client.pull_into([piece for remote, tensor in held for piece in remote.pieces(tensor)])
        for remote, tensor in held:
            remote.version = version(tensor)

    def send_written(self, held: Sequence[Held]) -> None:
        """Send what has been written here since it last was equal on the servers."""
        written = [(remote, tensor) for remote, tensor in held if version(tensor) != remote.version]
        self.client.change(
            [change for remote, tensor in written for change in remote.changes("assign", tensor)]
        )
        for remote, tensor in written:
            remote.version = version(tensor)

    def begin_run(self, registry: Registry) -> None:
        """Let the parameters and buffers of `registry` be what the servers have."""
        slots = {slot.tensor(): slot for slot in registry.buffers}  # modules may share a buffer
        self.sync(self.held([*registry.parameters(), *slots]))
        self._pulled = [
            _PulledBuffer(self[tensor], slot, tensor, tensor.clone())
            for tensor, slot in slots.items()
            if tensor is not None and tensor in self
        ]

    def end_run(self) -> None:
        """Send what the run has added to buffers."""
        changes: list[Change] = []
        for remote, slot, tensor, before in self._pulled:
            _put_back(slot, tensor)
            if tensor.dtype is not torch.bool and tensor.shape == before.shape:
                added = tensor - before
                if added.any():
                    changes += remote.changes("assign_add", added)
            remote.version = version(tensor)
        self.drop_run()
        self.client.change(changes)

    def drop_run(self) -> None:
        """What the run has added to buffers is not to be sent."""
        self._pulled = []


def _put_back(slot: BufferSlot, tensor: torch.Tensor) -> None:
    """A forward may have put another tensor in the buffer's place: its values are the buffer's."""
    module, now = slot.module(), slot.tensor()
    if module is None or now is None or now is tensor:
        return
    if (now.shape, now.dtype) == (tensor.shape, tensor.dtype):
        with torch.no_grad():
            tensor.copy_(now)
        module._buffers[slot.key] = tensor
