"""Buffers that a forward writes, such as batch norm's statistics. Each replica writes its own copies.

Each reduction of gradients also averages the copies that were written, in place. So one rank alone can read a
`state_dict`, as most scripts do. Integer buffers get replica 0's values.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpistrat import arrays
from mpistrat.cross_device_ops import packing
from mpistrat.pytorch.modules.registry import BufferSlot, Registry, is_inexact
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.torch_modules import ModuleParts

Snapshot = list["tuple[torch.Tensor | None, bool]"]
_Copies = dict[int, list[Any]]  # each replica's copies of a buffer, by the buffer's index


def snapshot(registry: Registry) -> Snapshot:
    """Return a pair for each mirrored buffer: this replica's tensor, and whether a forward may have written it.

    Writes count since the last average. If one buffer of a module is written, all of its buffers count as written,
    because torch's batch norm writes its statistics without a change of `_version`.
    Called by: each replica, at the end of its backward.
    Returns: the pairs in the order of `registry.buffers`. The tensor is None if the program has dropped the module.
    """
    # The list keeps the modules alive, so that no `id` is used twice.
    found = [(slot, slot.module(), slot.tensor()) for slot in registry.buffers]
    written = {id(module) for slot, module, tensor in found if slot.changed(tensor)}
    return [(tensor, id(module) in written) for _, module, tensor in found]


_LIMITS = np.iinfo(np.int32)


def flags_of(snapshots: Sequence[Snapshot]) -> np.ndarray:
    """Return flags of the buffers that this rank's replicas have written. The ranks take the MAX of all flags.

    Args: snapshots: a snapshot for each replica of this rank.
    Returns: int32 of shape [3 · buffers]: for each buffer 1 if it was written, else 0; the checksum of its shape; and
        the checksum's negative. After the MAX the checksums cancel only if all replicas have the same shape.
    """
    flags = np.array([(0, _LIMITS.min, _LIMITS.min)] * len(snapshots[0]), np.int32)
    for taken in snapshots:
        for row, (tensor, written) in zip(flags, taken, strict=True):
            if tensor is None:
                row[1] = _LIMITS.max  # if a replica lacks the buffer, it is not averaged
            else:
                checksum = zlib.crc32(repr(tuple(tensor.shape)).encode()) >> 1
                np.maximum(row, (written, checksum, -checksum), out=row)
    return flags.reshape(-1)


def to_average(flags: np.ndarray) -> np.ndarray:
    """Return a boolean for each buffer: whether any replica has written it, and its shape is equal on all replicas.

    Shapes differ if a forward replaces a buffer by one of its batch's length, such as a cache of positions. Such a
    buffer is not averaged.
    Args: flags: the MAX of `flags_of` over all ranks.
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
    """Average the flagged buffers over all replicas of all ranks, in place. Integers get the first replica's values.

    There is one collective for each dtype of floats; integers are sent in the same messages. The host waits for no
    device.
    Called by: every rank.
    Args:
        parts: the strategy's communicator and replicas.
        slots: the slots of the buffers.
        snapshots: a snapshot for each replica of this rank.
        flags: a boolean for each slot, from `to_average`; equal on all ranks.
        label: the call's name in reports.
    """
    copies: _Copies = {
        i: [taken[i][0] for taken in snapshots] for i in np.flatnonzero(flags).tolist()
    }
    floats, integers = list[int](), list[int]()
    for i, tensors in copies.items():
        (floats if is_inexact(tensors[0]) else integers).append(i)
    values = _values_of_all(parts, copies, floats, integers, label)
    _write(slots, copies, values)
    for i, tensors in copies.items():
        slots[i].settle(tensors)


def _values_of_all(
    parts: ModuleParts, copies: _Copies, floats: list[int], integers: list[int], label: str
) -> dict[int, torch.Tensor]:
    """Return the means of the buffers `floats`, and the first replica's buffers `integers`, by index. Collective."""
    packs: list[_BytePack] = []
    if parts.replicas.records_steps:  # the sum covers all replicas that run one program
        sums_of_rank = [parts.replicas.sum_of_rank(copies[i][0].detach()) for i in floats]
        contributions = [[total] for total in sums_of_rank]
    else:
        packs = _byte_packs(copies, floats, integers)
        is_first = parts.group.first_replica_id == 0
        contributions = [copies[i] for i in floats]
        contributions += [pack.components(is_first) for pack in packs]
    sums = parts.ops.over_ranks.all_reduce(ReduceOp.SUM, contributions, label=label)
    values: dict[int, torch.Tensor] = {}
    if floats:
        means = torch._foreach_div(sums[: len(floats)], parts.group.num_replicas_in_sync)
        values.update(zip(floats, means, strict=True))
    for pack, total in zip(packs, sums[len(floats) :], strict=True):
        values.update(pack.values_of(total))
    if parts.replicas.records_steps:
        values.update(_broadcast(parts, copies, integers, label))
    return values


# A byte that is sent as a 32-bit float takes four times its memory. So packs of more bytes are sent as bytes.
_MOST_BYTES_AMONG_FLOATS = 2**16


class _BytePack:
    """A flat buffer of all integer and boolean buffers of one device, as bytes: numbers from 0 to 255.

    All replicas but the first of all send zeros, so the sum over replicas has the first replica's values.
    Args:
        groups: a list of buffers' indices for each dtype. The widest dtype comes first, so that each is aligned.
        copies: the tensor of each replica of this rank, by the buffer's index.
    """

    def __init__(self, groups: Sequence[Sequence[int]], copies: _Copies) -> None:
        self._groups = [(group, [copies[i][0].detach() for i in group]) for group in groups]
        joined = [packing.concatenated(tensors) for _, tensors in self._groups]
        self._bytes = torch.cat([flat.view(torch.uint8) for flat in joined])
        self._others = len(copies[groups[0][0]]) - 1

    def send_as(self, dtype: torch.dtype) -> None:
        """Convert the bytes to floats of `dtype`, so that they are sent with other floats. Large packs stay bytes.

        Args: dtype: has 16 bits or more, so that it holds each number up to 255 exactly.
        """
        if len(self._bytes) <= _MOST_BYTES_AMONG_FLOATS:
            self._bytes = self._bytes.to(dtype)

    def components(self, is_first: bool) -> list[torch.Tensor]:
        """Return the contribution of each replica of this rank: the bytes or zeros.

        Args: is_first: whether this rank has the first replica of all. Only this replica contributes the bytes.
        """
        zeros = torch.zeros_like(self._bytes)
        return [self._bytes if is_first else zeros, *[zeros] * self._others]

    def values_of(self, total: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield pairs of a buffer's index and the first replica's values. Args: total: the sum of all contributions."""
        left = total.to(torch.uint8)
        for group, like in self._groups:
            size = sum([tensor.nbytes for tensor in like])
            pieces = packing.unpack(left[:size].view(like[0].dtype), like)
            yield from zip(group, pieces, strict=True)
            left = left[size:]


def _byte_packs(copies: _Copies, floats: Sequence[int], integers: Sequence[int]) -> list[_BytePack]:
    """Return a pack of the buffers `integers` for each device, in the widest dtype of `floats` on the same device.

    Without floats there, or if the pack is large, it is a pack of bytes.
    """
    like = {i: tensors[0] for i, tensors in copies.items()}
    groups: dict[torch.device, list[list[int]]] = {}
    for group in sorted(packing.alike(like, integers), key=lambda group: -like[group[0]].itemsize):
        groups.setdefault(like[group[0]].device, []).append(group)
    packs = {device: _BytePack(of_device, copies) for device, of_device in groups.items()}
    for tensor in sorted([like[i] for i in floats], key=operator.attrgetter("itemsize")):
        if tensor.device in packs and tensor.is_floating_point() and tensor.itemsize > 1:
            packs[tensor.device].send_as(tensor.dtype)
    return list(packs.values())


def _broadcast(
    parts: ModuleParts, copies: _Copies, indices: Sequence[int], label: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """Broadcast rank 0's values through the host, and yield pairs of a buffer's index and values. Collective."""
    like = {i: tensors[0].detach() for i, tensors in copies.items()}
    for group in packing.alike(like, indices):
        tensors = [like[i] for i in group]
        flat = arrays.to_host(packing.concatenated(tensors))
        parts.group.communicator.broadcast(flat, label=label)
        if parts.replicas.device_of_modules is not None:
            # Move all at once: a scalar 0 or 1 from the host would become a constant of XLA's graph.
            flat = arrays.to_device(flat, parts.replicas.device_of_modules)
        yield from zip(group, packing.unpack(flat, tensors), strict=True)


def _write(
    slots: Sequence[BufferSlot], copies: _Copies, values: Mapping[int, torch.Tensor]
) -> None:
    """Copy `values` into each replica's buffers, in place, on all replicas of this rank.

    The `_version` of a buffer grows only if the forward's write has made it grow. A graph that waits for its backward
    may hold the buffer, and torch refuses the backward if the version has grown.
    Args: values: the new values, by the buffer's index.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for i, value in values.items():
        for tensor in copies[i]:
            targets.append(tensor.detach() if slots[i].changed(tensor) else tensor.data)
            sources.append(value.view(tensor.shape))
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
