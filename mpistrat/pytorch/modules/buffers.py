"""Buffers that a forward writes (batch norm's statistics): each replica's own, averaged for readers.

Each reduction of gradients also averages buffers, so reading a `state_dict` on one rank, as everybody's script does,
needs no communication. Integer buffers take replica 0's value.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpistrat import arrays
from mpistrat.cross_device_ops import packing
from mpistrat.pytorch.modules.registry import BufferSlot, Registry
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.torch_modules import ModuleParts

Snapshot = list["tuple[torch.Tensor | None, bool]"]


def snapshot(registry: Registry) -> Snapshot:
    """Each buffer of the replica that runs here, and whether it may have been written since the last average.

    Torch's batch norm writes its statistics without counting that as a write, but counts its batches in another buffer:
    if one buffer of a module was written, the others may be, too.
    """
    # The modules themselves: a reference to a module that is gone has no hash.
    found = [(slot, slot.module(), slot.tensor()) for slot in registry.buffers]
    written = {id(module) for slot, module, tensor in found if slot.changed(tensor)}
    return [(tensor, id(module) in written) for _, module, tensor in found]


_LIMITS = np.iinfo(np.int32)


def flags_of(snapshots: Sequence[Snapshot]) -> np.ndarray:
    """Of the buffers that a local replica has written. The ranks then take the MAX of all flags.

    Returns: int32, for each buffer: written, and the shape's checksum and its negative.
    """
    flags = np.array([(0, _LIMITS.min, _LIMITS.min)] * len(snapshots[0]), np.int32)
    for taken in snapshots:
        for row, (tensor, written) in zip(flags, taken, strict=True):
            if tensor is None:
                row[1] = _LIMITS.max  # a rank without it has no part in an average
            else:
                checksum = zlib.crc32(repr(tuple(tensor.shape)).encode()) >> 1
                np.maximum(row, (written, checksum, -checksum), out=row)
    return flags.reshape(-1)


def to_average(flags: np.ndarray) -> np.ndarray:
    """Which buffers were written on some replica, and have one shape on all of them.

    A forward may replace a buffer by one of its batch's length, such as a cache of positions: that is left alone.
    """
    rows = flags.reshape(-1, 3)
    return (rows[:, 0] == 1) & (rows[:, 1] == -rows[:, 2])


def average(
    parts: ModuleParts,
    slots: Sequence[BufferSlot],
    snapshots: Sequence[Snapshot],
    flags: np.ndarray,
    label: str = "buffers",
) -> None:
    """Average the flagged buffers over all replicas of all ranks, in place. One collective for each dtype of floats.

    Called by: every rank. Integers travel with the floats. The host waits for no device.
    """
    flagged: list[int] = np.flatnonzero(flags).tolist()
    firsts: list[Any] = [tensor for tensor, _ in snapshots[0]]
    present = [i for i in flagged if firsts[i] is not None]
    floats = [i for i in present if firsts[i].dtype.is_floating_point or firsts[i].dtype.is_complex]
    others = sorted({*present} - {*floats})
    own: list[list[Any]] = [[taken[i][0] for taken in snapshots] for i in floats]
    as_bytes: list[_AsBytes] = []
    if parts.replicas.records_steps:  # of all replicas that share a name
        own = [[parts.replicas.sum_of_rank(tensor.detach())] for (tensor,) in own]
    else:
        as_bytes = _as_bytes(firsts, floats, others)
        is_first = parts.group.first_replica_id == 0
        own += [integers.components(len(snapshots), is_first) for integers in as_bytes]
    sums = parts.ops.over_ranks.all_reduce(ReduceOp.SUM, own, label=label)
    values: dict[int, torch.Tensor] = {}
    if floats:
        means = torch._foreach_div(sums[: len(floats)], parts.group.num_replicas_in_sync)
        values.update(zip(floats, means, strict=True))
    for integers, total in zip(as_bytes, sums[len(floats) :], strict=True):
        values.update(integers.values_of(total))
    if parts.replicas.records_steps:
        values.update(_broadcast(parts, firsts, others, label))
    _write(slots, snapshots, values)
    for i in flagged:
        slots[i].settle([taken[i][0] for taken in snapshots])


# As bytes in floats of 32 bits integers take four times their memory.
_MOST_BYTES_AMONG_FLOATS = 2**16


class _AsBytes:
    """Integers and booleans of one device as numbers from 0 to 255, to which the other replicas add zeros.

    Args:
        groups: the indices of those of one dtype, the widest first, so that each is aligned.
        like: the buffers by index.
        carrier: the dtype of the numbers; every float of at least 16 bits keeps them exactly.
    """

    def __init__(
        self, groups: Sequence[Sequence[int]], like: Sequence[torch.Tensor], carrier: torch.dtype
    ) -> None:
        self._groups, self._like, self._carrier = groups, like, carrier

    def components(self, count: int, is_first: bool) -> list[torch.Tensor]:
        """The contributions of this rank's `count` replicas. Args: is_first: they are the first of all replicas."""
        joined = [packing.concatenated([self._like[i].detach() for i in g]) for g in self._groups]
        first = torch.cat([flat.view(torch.uint8) for flat in joined]).to(self._carrier)
        zeros = torch.zeros_like(first)
        return [first if is_first else zeros, *[zeros] * (count - 1)]

    def values_of(self, total: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The first replica's buffers by index, from the sum of all contributions."""
        left = total.to(torch.uint8)
        for group in self._groups:
            like = [self._like[i] for i in group]
            size = sum(tensor.nbytes for tensor in like)
            pieces = packing.unpack(left[:size].view(like[0].dtype), like)
            yield from zip(group, pieces, strict=True)
            left = left[size:]


def _as_bytes(
    like: Sequence[torch.Tensor], floats: Sequence[int], others: Sequence[int]
) -> list[_AsBytes]:
    """The `others`, by device, in the dtype of the widest `floats` there; many, or alone, as they are."""
    found = []
    for device in dict.fromkeys(like[i].device for i in others):
        here = [i for i in others if like[i].device == device]
        kinds = [like[i].dtype for i in floats if like[i].device == device]
        kinds = [kind for kind in kinds if kind.is_floating_point and kind.itemsize > 1]
        if sum(like[i].nbytes for i in here) > _MOST_BYTES_AMONG_FLOATS:
            kinds = []
        carrier = max(kinds, key=lambda kind: kind.itemsize, default=torch.uint8)
        groups = sorted(packing.alike(like, here), key=lambda group: -like[group[0]].itemsize)
        found.append(_AsBytes(groups, like, carrier))
    return found


def _broadcast(
    parts: ModuleParts, like: Sequence[torch.Tensor], indices: Sequence[int], label: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """Rank 0's buffers, through the host."""
    for group in packing.alike(like, indices):
        own = [like[i].detach() for i in group]
        flat = arrays.to_host(packing.concatenated(own))
        parts.group.communicator.broadcast(flat, label=label)
        if parts.replicas.device_of_modules is not None:
            # All at once: XLA makes a scalar that a host tensor sets a part of the graph if it is 0 or 1.
            flat = arrays.to_device(flat, parts.replicas.device_of_modules)
        yield from zip(group, packing.unpack(flat, own), strict=True)


def _write(
    slots: Sequence[BufferSlot], snapshots: Sequence[Snapshot], values: Mapping[int, torch.Tensor]
) -> None:
    """Write each replica's buffers so that torch counts it only if it counted the forward's own write.

    A graph that still waits for its backward may hold a buffer: torch lets batch norm write it in the next forward
    meanwhile, and refuses what an in-place operation has changed.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for i, value in values.items():
        for taken in snapshots:
            tensor: Any = taken[i][0]
            targets.append(tensor.detach() if slots[i].changed(tensor) else tensor.data)
            sources.append(value.view(tensor.shape))
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
