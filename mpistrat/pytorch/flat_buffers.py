"""Flat buffers: the dense gradients of one backward, one message per dtype and device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.communicators import Communicator
from mpistrat.pytorch.registry import Registry
from mpistrat.pytorch.wires import Wire, Wires
from mpistrat.recycled_buffers import RecycledBuffers
from mpistrat.wire_formats import WireFormat


@dataclasses.dataclass
class Group:
    """Slots whose gradients share a flat buffer: `pieces` are views of `flat`, one for each of `parameters`."""

    flat: torch.Tensor
    slots: list[int]
    parameters: list[torch.Tensor]
    pieces: list[torch.Tensor]


class FlatBuffers:
    """Packs contributions, reduces them, and hands out views of the sums as gradients.

    Args:
        registry: of the parameters.
        wire_format: in which sums cross the network; None sends them as they are.

    A buffer on the host is used again once no gradient, and nothing the program made of one, refers to it.
    """

    def __init__(self, registry: Registry, wire_format: WireFormat | None = None) -> None:
        self.wires = Wires(wire_format, registry)
        self._recycled = RecycledBuffers()

    def groups(
        self,
        communicator: Communicator,
        slots: Sequence[int],
        parameters: Sequence[torch.Tensor | None],
        *,
        asks: bool = True,
    ) -> Iterator[Group]:
        """One for each dtype and device, with the slots in their order; uninitialized.

        Collective, unless `asks` is False: then there is no larger window than there has been.
        """
        for (dtype, device), group in alike(slots, parameters).items():
            like: list[Any] = [parameters[slot] for slot in group]
            length = sum(p.numel() for p in like)
            has_window = asks or length * dtype.itemsize <= communicator.window_capacity
            flat = self._buffer(communicator if has_window else None, length, dtype, device)
            yield Group(flat, group, like, as_pieces(flat, like))

    def reduce(
        self,
        communicator: Communicator,
        slots: list[int],
        parameters: list[torch.Tensor | None],
        contributions: list[list[Any]],
        scale: float | None,
    ) -> list[torch.Tensor]:
        """The reduced gradients of `slots`, all of which are dense.

        Args:
            contributions: for each local replica its gradients by slot; None counts as zero.
            scale: multiplied to the sums, or None.
        """
        views: dict[int, torch.Tensor] = {}
        for group in self.groups(communicator, slots, parameters):
            fill(group.pieces, [contributions[0][slot] for slot in group.slots])
            for others in contributions[1:]:
                for piece, slot in zip(group.pieces, group.slots, strict=True):
                    if others[slot] is not None:
                        piece.add_(others[slot])
            wire = self.wires.of(group.slots)
            label = f"gradients of {len(group.slots)} parameters{self.wires}"
            _all_reduce(communicator, group.flat, label, scale, wire)
            views.update(zip(group.slots, group.pieces, strict=True))
        return [views[slot] for slot in slots]

    def _buffer(
        self,
        communicator: Communicator | None,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Uninitialized; on the host in the window of `communicator`, if there is room."""
        if device.type != "cpu":
            return torch.empty(
                length, dtype=dtype, device=device
            )  # the device's allocator recycles
        memory = communicator and communicator.window_buffer(length * dtype.itemsize)
        if memory is not None:
            return torch.from_numpy(memory).view(dtype)
        buffer: torch.Tensor = self._recycled.like(torch.empty(length, dtype=dtype, device="meta"))
        return buffer


def alike(
    slots: Sequence[int], parameters: Sequence[torch.Tensor | None]
) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    """The slots of each dtype and device, in their order. A parameter on "meta" stands for one of the host."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for slot in slots:
        parameter = parameters[slot]
        assert parameter is not None, "a dropped parameter cannot have a gradient"
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        found.setdefault((parameter.dtype, device), []).append(slot)
    return found


def as_pieces(flat: torch.Tensor, like: list[Any]) -> list[torch.Tensor]:
    """Views of `flat`, shaped and strided as the parameters are, so that optimizers need no copies."""
    pieces = []
    for piece, parameter in zip(flat.split([p.numel() for p in like]), like, strict=True):
        dense = parameter.is_contiguous() or is_dense(parameter)
        stride = parameter.stride() if dense else None
        pieces.append(
            piece.view(parameter.shape)
            if stride is None
            else piece.as_strided(parameter.shape, stride, piece.storage_offset())
        )
    return pieces


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def fill(pieces: list[torch.Tensor], gradients: list[Any]) -> None:
    """Copy `gradients` into `pieces`; None counts as zero."""
    absent = [piece for piece, gradient in zip(pieces, gradients, strict=True) if gradient is None]
    if absent:
        torch._foreach_zero_(absent)
    targets = [p for p, g in zip(pieces, gradients, strict=True) if g is not None]
    sources = [g.to_dense() if g.is_sparse else g for g in gradients if g is not None]
    if targets:
        torch._foreach_copy_(targets, sources)


def _all_reduce(
    communicator: Communicator,
    flat: torch.Tensor,
    label: str,
    scale: float | None,
    wire: Wire | None,
) -> None:
    if flat.device.type == "cpu" or communicator.takes_device_buffers:
        communicator.all_reduce(flat, label=label, scale=scale, wire=wire)
    elif communicator.size > 1:
        host = arrays.to_host(flat)
        communicator.all_reduce(host, label=label, scale=scale, wire=wire)
        flat.copy_(host)
    elif scale is not None:
        flat.mul_(scale)
