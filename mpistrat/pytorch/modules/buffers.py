"""Buffers that a forward writes (batch norm's statistics): each replica's own, averaged for readers.

Each reduction of gradients also averages buffers, so reading a `state_dict` on one rank, as everybody's script does,
needs no communication. Integer buffers take replica 0's value.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
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
    tensors = [(slot, slot.tensor()) for slot in registry.buffers]
    written = {slot.module for slot, tensor in tensors if slot.changed(tensor)}
    return [(tensor, slot.module in written) for slot, tensor in tensors]


FLAGS_PER_BUFFER = 3


def flag_written(snapshots: Sequence[Snapshot], flags: np.ndarray) -> None:
    """Set the flags of the buffers that a local replica has written. The ranks then take the MAX of all flags.

    Args:
        flags: of shape [buffers · FLAGS_PER_BUFFER]: written, and the shape's checksum and its negative.
    """
    rows = flags.reshape(-1, FLAGS_PER_BUFFER)
    rows[:, 1:] = np.iinfo(flags.dtype).min
    for taken in snapshots:
        for row, (tensor, written) in zip(rows, taken, strict=True):
            if tensor is not None:
                checksum = zlib.crc32(repr(tuple(tensor.shape)).encode()) >> 1
                row[:] = np.maximum(row, (written, checksum, -checksum))


def to_average(flags: np.ndarray) -> np.ndarray:
    """Which buffers were written on some replica, and have one shape on all of them.

    A forward may replace a buffer by one of its batch's length, such as a cache of positions: that is left alone.
    """
    rows = flags.reshape(-1, FLAGS_PER_BUFFER)
    return (rows[:, 0] == 1) & (rows[:, 1] == -rows[:, 2])


def average(
    parts: ModuleParts,
    slots: Sequence[BufferSlot],
    snapshots: Sequence[Snapshot],
    flags: np.ndarray,
    label: str = "buffers",
) -> None:
    """Average the flagged buffers over all replicas of all ranks, in place. Collective."""
    flagged: list[int] = np.flatnonzero(flags).tolist()
    firsts: list[Any] = [tensor for tensor, _ in snapshots[0]]
    present = [i for i in flagged if firsts[i] is not None]
    floats = [i for i in present if firsts[i].dtype.is_floating_point or firsts[i].dtype.is_complex]
    others = sorted({*present} - {*floats})
    own: list[list[Any]] = [[taken[i][0] for taken in snapshots] for i in floats]
    if parts.replicas.records_steps:  # of all replicas that share a name
        own = [[parts.replicas.sum_of_rank(tensor.detach())] for (tensor,) in own]
    sums = parts.ops.over_ranks.all_reduce(ReduceOp.SUM, own, label=label)
    for i, total in zip(floats, sums, strict=True):
        _write(slots[i], snapshots, i, total / parts.group.num_replicas_in_sync)
    for group in packing.alike(firsts, others):
        like = [firsts[i].detach() for i in group]
        flat = arrays.to_host(packing.concatenated(like))
        parts.group.communicator.broadcast(flat, label=label)
        if parts.replicas.device_of_modules is not None:
            # All at once: XLA makes a scalar that a host tensor sets a part of the graph if it is 0 or 1.
            flat = arrays.to_device(flat, parts.replicas.device_of_modules)
        for i, value in zip(group, packing.unpack(flat, like), strict=True):
            _write(slots[i], snapshots, i, value)
    for i in flagged:
        slots[i].settle([taken[i][0] for taken in snapshots])


def _write(
    slot: BufferSlot, snapshots: Sequence[Snapshot], index: int, value: torch.Tensor
) -> None:
    """Write each replica's buffer so that torch counts it only if it counted the forward's own write.

    A graph that still waits for its backward may hold the buffer: torch lets batch norm write it in the next forward
    meanwhile, and refuses what an in-place operation has changed.
    """
    for taken in snapshots:
        tensor: Any = taken[index][0]
        target = tensor.detach() if slot.changed(tensor) else tensor.data
        with torch.no_grad():
            target.copy_(value.view(target.shape))
