"""Torch parameters and buffers on servers: their addresses, and how ranks send and pull their values."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.parameter_server.client.client import Change, Client
from mpistrat.parameter_server.protocol.messages import Address, GradientMethod
from mpistrat.pytorch.modules.registry import BufferSlot, Registry, version

# A tensor's parts, in order: for each part, the server's rank and the array's number on that server.
Places = tuple[tuple[int, int], ...]
PARAMETER = "parameter"
ROWS = "rows of a parameter"
BUFFER = "buffer"
# The other rank finds or makes its tensor by this key: kind, places, device type and `requires_grad`.
TensorKey = tuple[str, Places, str, bool]


@dataclasses.dataclass(eq=False)
class RemoteTensor:
    """One parameter or buffer on the servers.

    Attributes:
        owns: whether the servers take the values that this rank writes to the tensor outside optimizers' steps.
        addresses: the arrays of the tensor's parts, which are consecutive rows; one address if the tensor is not split.
        version: torch's version counter when the tensor last had the servers' values.
        rows_only: whether ranks keep no copy of the tensor, and pull the rows that they need.
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
        """The number of rows of each part."""
        return [address.spec.shape[0] for address in self.addresses]

    def pieces(self, tensor: Tensor) -> list[tuple[Address, Tensor]]:
        """Split `tensor`, of the whole shape, by parts. Returns: for each part its address and a view of its rows."""
        if not self.split:
            return [(self.addresses[0], tensor)]
        return list(zip(self.addresses, tensor.split(self.rows), strict=True))

    def changes(self, method: str | GradientMethod, operand: Tensor) -> list[Change]:
        """Return a change for each part, by the part's rows of `operand`, for `Client.change`.

        Args: method: "assign", "assign_add", or an optimizer's step with `operand` as the gradient.
        """
        return [Change(address, method, piece) for address, piece in self.pieces(operand)]

    def by_part(self, indices: Tensor) -> list[tuple[Address, int, slice]]:
        """Divide ascending row `indices` among the parts.

        Returns: for each part its address, the number of its first row in the whole tensor, and the slice of `indices`
            with the rows of this part, which may be empty.
        """
        bounds = [*itertools.accumulate(self.rows, initial=0)]
        cuts = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
        parts = []
        for number, address in enumerate(self.addresses):
            part = slice(cuts[number], cuts[number + 1])
            parts.append((address, bounds[number], part))
        return parts

    def pull_rows(self, indices: Tensor) -> Tensor:
        """Return a copy of the rows at `indices` (int64, ascending, shape [n]), on the device of `indices`.

        Raises: IndexError if a row does not exist.
        """
        count = sum(self.rows)
        first_and_last = indices[:1].tolist() + indices[-1:].tolist()
        for row in first_and_last:
            if not 0 <= row < count:
                raise IndexError(f"row {row} of an embedding of {count} rows does not exist")
        parts = [
            self.client.rows(address, (indices[part] - first).cpu().numpy())
            for address, first, part in self.by_part(indices)
            if part.start < part.stop or not self.split
        ]
        if not parts:
            return self.pull_rows(indices.new_zeros(1))[:0]
        return torch.cat(parts).to(indices.device)

    def pull(self, like: Tensor) -> Tensor:
        """Return a copy of the whole tensor, with the shape, dtype and device of `like`."""
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self.client.pull_into(self.pieces(out))
        return out

    def assign(self, value: Tensor) -> None:
        """Set the tensor on the servers to `value`, if this rank owns it."""
        if self.owns:
            self.client.change(self.changes("assign", value.detach()))


Held = tuple[RemoteTensor, Tensor]  # a remote tensor and this rank's copy of it, detached


class _PulledBuffer(NamedTuple):
    """A buffer in a run. Attributes: before: a copy of the values that the run began with."""

    remote: RemoteTensor
    slot: BufferSlot
    tensor: Tensor
    before: Tensor


class RemoteTensors:
    """The parameters and buffers that one strategy has on servers.

    Args: owns: whether the servers take the values that this rank writes to the tensors outside optimizers' steps.
    """

    def __init__(self, client: Client, owns: bool) -> None:
        self.client = client
        self.owns = owns
        self._remote: MutableMapping[Tensor | None, RemoteTensor] = WeakIdKeyDictionary()
        self._pulled: list[_PulledBuffer] = []
        self._by_place: weakref.WeakValueDictionary[Places, Tensor] = weakref.WeakValueDictionary()

    def __contains__(self, tensor: Tensor | None) -> bool:
        return tensor in self._remote

    def __getitem__(self, tensor: Tensor) -> RemoteTensor:
        return self._remote[tensor]

    def add(self, tensor: Tensor, addresses: Sequence[Address]) -> RemoteTensor:
        """Register `tensor` with arrays at `addresses`; the first `sync` overwrites it with the servers' values."""
        remote = RemoteTensor(self.client, self.owns, addresses, version(tensor))
        self._remote[tensor] = remote
        return remote

    def key_of(self, value: Any) -> TensorKey | None:
        """Return the key by which another rank finds its own tensor; None if `value` is no tensor on the servers."""
        if not isinstance(value, Tensor) or value not in self:
            return None
        remote = self[value]
        places = tuple((address.server, address.key) for address in remote.addresses)
        self._by_place[places] = value
        if not isinstance(value, Parameter):
            kind = BUFFER
        elif remote.rows_only:
            kind = ROWS
        else:
            kind = PARAMETER
        return kind, places, value.device.type, value.requires_grad

    def find(self, key: TensorKey) -> Tensor:
        """Return this rank's tensor for a key that this rank's `key_of` has returned.

        Raises: KeyError if the tensor was garbage-collected.
        """
        _, places, _, _ = key
        return self._by_place[places]

    def held(self, tensors: Iterable[Tensor | None]) -> list[Held]:
        """Return (RemoteTensor, the detached tensor) for each of the tensors that is on servers.

        Leaves out None, tensors that are not on servers, and embeddings without memory on this rank.
        """
        return [
            (self[tensor], tensor.detach())
            for tensor in tensors
            if tensor is not None and tensor in self and not self[tensor].rows_only
        ]

    def sync(self, held: Sequence[Held]) -> None:
        """Pull the servers' values into the tensors of `held`. An owner first sends the tensors that it has written."""
        if self.owns:
            self.send_written(held)
        pieces = []
        for remote, tensor in held:
            pieces += remote.pieces(tensor)
        self.client.pull_into(pieces)
        for remote, tensor in held:
            remote.version = version(tensor)

    def send_written(self, held: Sequence[Held]) -> None:
        """Send the tensors of `held` that this rank has written since they last had the servers' values.

        Torch's version counters show the writes. Called by: the rank that owns the tensors, in `sync` and before a
        function that uses a tensor is sent.
        """
        written = []
        changes: list[Change] = []
        for remote, tensor in held:
            if version(tensor) != remote.version:
                written.append((remote, tensor))
                changes += remote.changes("assign", tensor)
        self.client.change(changes)
        for remote, tensor in written:
            remote.version = version(tensor)

    def begin_run(self, registry: Registry) -> None:
        """Pull the servers' values into the tensors of `registry`, and keep copies of the buffers for `end_run`."""
        slots = {slot.tensor(): slot for slot in registry.buffers}  # modules may share a buffer
        self.sync(self.held([*registry.parameters(), *slots]))
        self._pulled = [
            _PulledBuffer(self[tensor], slot, tensor, tensor.clone())
            for tensor, slot in slots.items()
            if tensor is not None and tensor in self
        ]

    def end_run(self) -> None:
        """Send the difference that the run has made to each buffer. The servers add the differences of all ranks.

        Buffers of dtype bool, and buffers whose shape has changed, are not sent.
        """
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
        """Forget the changes that the run has made to buffers, without sending them."""
        self._pulled = []


def _put_back(slot: BufferSlot, tensor: Tensor) -> None:
    """If a forward has replaced the buffer `tensor` by one of the same shape and dtype, copy it back into `tensor`."""
    module = slot.module()
    now = slot.tensor()
    if module is None or now is None or now is tensor:
        return
    if now.shape == tensor.shape and now.dtype == tensor.dtype:
        with torch.no_grad():
            tensor.copy_(now)
        module._buffers[slot.key] = tensor
