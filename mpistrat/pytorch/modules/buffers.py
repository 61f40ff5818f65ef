"""Buffers that a forward writes (batch norm's statistics): each replica's own, averaged for readers.

The averages ride along with each reduction of gradients, so reading a `state_dict` on one rank, as
everybody's script does, needs no communication. Integer buffers take replica 0's value.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat import arrays
from mpistrat.context import AnyStrategy, get_replica_context, has_strategy
from mpistrat.cross_device_ops import packing
from mpistrat.pytorch.modules.registry import BufferSlot, Registry
from mpistrat.reduce_op import ReduceOp

if TYPE_CHECKING:
    from mpistrat.replicas.extended import StrategyExtended

_strategy_of: WeakIdKeyDictionary = WeakIdKeyDictionary()

Snapshot = list["tuple[torch.Tensor | None, bool]"]


def snapshot(registry: Registry) -> Snapshot:
    """Each buffer of the replica that runs here, and whether it may have been written since the last average.

    Torch's batch norm writes its statistics without counting that as a write, but counts its batches in
    another buffer: where one buffer of a module was written, the others are taken to be, too.
    """
    tensors = [slot.tensor() for slot in registry.buffers]
    written = {
        slot.module
        for slot, tensor in zip(registry.buffers, tensors, strict=True)
        if slot.changed(tensor)
    }
    return [
        (tensor, slot.module in written)
        for slot, tensor in zip(registry.buffers, tensors, strict=True)
    ]


FLAGS_PER_BUFFER = 3


def flag_written(snapshots: Sequence[Snapshot], flags: np.ndarray) -> None:
    """Set the flags of the buffers that a local replica has written; their MAX over ranks is agreed on.

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

    One that a forward replaces by another of its batch's length, a cache of positions, is left alone.
    """
    rows = flags.reshape(-1, FLAGS_PER_BUFFER)
    return (rows[:, 0] == 1) & (rows[:, 1] == -rows[:, 2])


def average(
    extended: StrategyExtended,
    slots: Sequence[BufferSlot],
    snapshots: Sequence[Snapshot],
    flags: np.ndarray,
    label: str = "buffers",
) -> None:
    """Average the flagged buffers over all replicas of all ranks, in place. Collective."""
    flagged: list[int] = np.flatnonzero(flags).tolist()
    floats: list[int] = []
    others: list[int] = []
    for i in flagged:
        tensor = snapshots[0][i][0]
        if tensor is not None:
            averaged = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            (floats if averaged else others).append(i)
    own: list[list[Any]] = [[taken[i][0] for taken in snapshots] for i in floats]
    if extended.replicas.records_steps:  # of all replicas that share a name
        own = [[extended.replicas.sum_of_rank(tensor.detach())] for (tensor,) in own]
    sums = extended.cross_replica_ops.over_ranks.all_reduce(ReduceOp.SUM, own, label=label)
    for i, total in zip(floats, sums, strict=True):
        mean = total / extended.num_replicas_in_sync
        for taken in snapshots:
            _write(slots[i], taken[i][0], mean)
    firsts: list[Any] = [tensor for tensor, _ in snapshots[0]]
    for group in packing.alike(firsts, others):
        like = [firsts[i].detach() for i in group]
        flat = arrays.to_host(packing.concatenated(like))
        extended.communicator.broadcast(flat, label=label)
        if extended.replicas.device_of_modules is not None:
            # All at once: XLA takes a scalar that a host tensor sets for a part of the graph, if it is 0 or 1.
            flat = arrays.to_device(flat, extended.replicas.device_of_modules)
        for i, value in zip(group, packing.unpack(flat, like), strict=True):
            for taken in snapshots:
                _write(slots[i], taken[i][0], value)
    for i in flagged:
        slots[i].settle([taken[i][0] for taken in snapshots])


def _write(slot: BufferSlot, tensor: Any, value: torch.Tensor) -> None:
    """Write `tensor` so that torch counts it only if it counted the forward's own write.

    A graph that still waits for its backward may hold the buffer: torch lets batch norm write it in the
    next forward meanwhile, and refuses what an in-place operation has changed.
    """
    target = tensor.detach() if slot.changed(tensor) else tensor.data
    with torch.no_grad():
        target.copy_(value.view(target.shape))


def average_before_state_dict(module: torch.nn.Module, strategy: AnyStrategy) -> None:
    """Have `module.state_dict()` average what was written since the last reduction of gradients."""
    if _before_state_dict not in module._state_dict_pre_hooks.values():
        module.register_state_dict_pre_hook(_before_state_dict)
    _strategy_of[module] = weakref.ref(strategy)


def _before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """A module-level function: it is saved and copied with the module by name alone."""
    reference = _strategy_of.get(module)
    strategy = None if reference is None else reference()
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return
    if has_strategy() and get_replica_context() is not None:
        return  # inside run a replica reads its own
    from mpistrat.pytorch import virtual_replicas

    registry = strategy.extended.modules.made.registry
    found = (registry.buffer(module, key) for key in module._buffers)
    slots = [slot for slot in found if slot is not None]
    if any(slot.changed(slot.tensor()) for slot in slots):
        copies = virtual_replicas.copies_of_buffers(strategy.extended, slots)
        snapshots = [[(tensor, True) for tensor in own] for own in copies]
        label = (
            "state_dict() averages buffers written since the last backward(): call it on every rank"
        )
        average(strategy.extended, slots, snapshots, np.ones(len(slots), np.int32), label)
