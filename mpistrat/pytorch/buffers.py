"""Buffers that a forward writes (batch norm's statistics): each replica's own, averaged for readers.

The averages ride along with each reduction of gradients, so reading a `state_dict` on one rank, as
everybody's script does, needs no communication. Integer buffers take replica 0's value.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpistrat.context import get_replica_context, has_strategy
from mpistrat.pytorch.registry import BufferSlot, Registry

if TYPE_CHECKING:
    from mpistrat.strategy_extended import StrategyExtended

_strategy_of: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()

Snapshot = list["tuple[torch.Tensor | None, bool]"]


def snapshot(registry: Registry) -> Snapshot:
    """Each buffer of the replica that runs here, and whether it has been written since the last average."""
    return [(slot.tensor(), slot.written()) for slot in registry.buffers]


def flag_written(snapshots: Sequence[Snapshot], flags: np.ndarray) -> None:
    """Set `flags[i]` where a local replica has written buffer i."""
    for taken in snapshots:
        for i, (_, written) in enumerate(taken):
            if written:
                flags[i] = 1


def average(
    extended: StrategyExtended,
    slots: Sequence[BufferSlot],
    snapshots: Sequence[Snapshot],
    flags: np.ndarray,
) -> None:
    """Average the flagged buffers over all replicas of all ranks, in place. Collective."""
    communicator = extended.communicator
    groups: dict[torch.dtype, list[int]] = {}
    for i in np.flatnonzero(flags):
        tensor = snapshots[0][i][0]
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(int(i))
    for dtype, group in groups.items():
        copies = [[taken[i][0] for i in group] for taken in snapshots]
        averaged = dtype.is_floating_point or dtype.is_complex
        if averaged:
            flats = [torch.cat([t.detach().reshape(-1).cpu() for t in own]) for own in copies]  # type: ignore[union-attr]
            flat = torch.stack(flats).sum(0) if len(flats) > 1 else flats[0]
            communicator.all_reduce(flat, label="buffers")
            flat = flat / extended.num_replicas_in_sync
        else:
            flat = torch.cat([t.detach().reshape(-1).cpu() for t in copies[0]])  # type: ignore[union-attr]
            communicator.broadcast(flat, label="buffers of replica 0")
        with torch.no_grad():
            for own in copies:
                pieces = flat.split([t.numel() for t in own])  # type: ignore[union-attr]
                for tensor, piece in zip(own, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))  # type: ignore[union-attr]
    for i in map(int, np.flatnonzero(flags)):
        slots[i].settle([taken[i][0] for taken in snapshots])


def average_before_state_dict(module: torch.nn.Module, strategy: Any) -> None:
    """Have `module.state_dict()` average what was written since the last reduction of gradients."""
    if module not in _strategy_of:
        module.register_state_dict_pre_hook(_before_state_dict)
    _strategy_of[module] = strategy


def _before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """A module-level function: it is saved and copied with the module by name alone."""
    strategy = _strategy_of.get(module)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return
    if has_strategy() and get_replica_context() is not None:
        return  # inside run a replica reads its own
    from mpistrat.pytorch import virtual_replicas

    registry = strategy._mirroring.registry
    slots = [slot for slot in registry.buffers if slot.module() is module]
    written = [slot.written() for slot in slots]
    if any(written):
        copies = virtual_replicas.copies_of_buffers(strategy.extended, slots)
        snapshots = [[(tensor, True) for tensor in own] for own in copies]
        average(strategy.extended, slots, snapshots, np.ones(len(slots), np.int32))
