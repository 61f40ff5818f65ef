"""Buffers that a forward writes, such as batch norm's statistics. Each replica writes its own copies.

Each reduction of gradients also makes one value of the copies that were written, in place, by the buffer's rule. So one
rank alone can read a `state_dict`, as most scripts do. Without a rule floats are averaged, integers get replica 0's
values, and a notice names buffers that may need another rule.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpistrat import arrays
from mpistrat.cross_device_ops import packing
from mpistrat.machine.notices import tell
from mpistrat.pytorch.modules.buffer_rules import RULES
from mpistrat.pytorch.modules.registry import BufferSlot, Registry, is_inexact
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.torch_modules import ModuleParts

Snapshot = list["tuple[torch.Tensor | None, int]"]
_Copies = dict[int, list[Any]]  # each replica's copies of a buffer, by the buffer's index
_Groups = dict[str, list[int]]  # the indices of the buffers with a rule, by the rule


def snapshot(registry: Registry) -> Snapshot:
    """Return a pair for each mirrored buffer: this replica's tensor, and 1 if a forward may have written it, else 0.

    Instead of these numbers, `_DIFFERS` stands for a buffer without a rule that has differed from the last result.
    Writes count since the last reduction. If one buffer of a module is written, all of its buffers count as written,
    because torch's batch norm writes its statistics without a change of `_version`.
    Called by: each replica, at the end of its backward.
    Returns: the pairs in the order of `registry.buffers`. The tensor is None if the program has dropped the module.
    """
    # The list keeps the modules alive, so that no `id` is used twice.
    found = [(slot, slot.module(), slot.tensor()) for slot in registry.buffers]
    written = {id(module) for slot, module, tensor in found if slot.changed(tensor)}
    return [
        (tensor, max(id(module) in written, _DIFFERS * slot.differs))
        for slot, module, tensor in found
    ]


_DIFFERS = 2
# Buffers without a rule are compared only in so many steps, because the host waits for devices.
_FIRST_STEPS = 64
_LIMITS = np.iinfo(np.int32)


def flags_of(snapshots: Sequence[Snapshot]) -> np.ndarray:
    """Return flags of the buffers that this rank's replicas have written. The ranks take the MAX of all flags.

    After the MAX the checksums of a shape cancel only if all replicas have the same shape. Shapes differ if a forward
    replaces a buffer by one of its batch's length, such as a cache of positions. Such a buffer is not reduced.

    Args: snapshots: a snapshot for each replica of this rank.
    Returns: int32 of shape [3 · buffers]: for each buffer the number of its snapshot; the checksum of its shape; and
        the checksum's negative.
    """
    unwritten = (0, _LIMITS.min, _LIMITS.min)
    count = len(snapshots[0])
    flags = np.array([unwritten] * count, np.int32)
    for taken in snapshots:
        for row, (tensor, written) in zip(flags, taken, strict=True):
            if tensor is None:
                row[1] = _LIMITS.max  # if a replica lacks the buffer, it is not reduced
            else:
                shape = repr(tuple(tensor.shape))
                checksum = zlib.crc32(shape.encode()) >> 1
                np.maximum(row, (written, checksum, -checksum), out=row)
    return flags.reshape(-1)


def reduce(
    parts: ModuleParts,
    slots: Sequence[BufferSlot],
    snapshots: Sequence[Snapshot],
    flags: np.ndarray,
    label: str = "buffers",
) -> None:
    """Make one value of all replicas' copies of each buffer that any replica has written, in place, by its rule.

    There is one collective for each dtype of means and sums; first replicas' values are sent in the same messages.
    Minima and maxima need further collectives. The host waits for no device, except for buffers without a rule in the
    first steps. Rank 0 tells of buffers without a rule that have differed.
    Called by: every rank.
    Args:
        parts: the strategy's communicator and replicas.
        slots: the slots of the buffers.
        snapshots: a snapshot for each replica of this rank.
        flags: the MAX of `flags_of` over all ranks.
        label: the call's name in reports.
    """
    numbers, shapes, negatives = flags.reshape(-1, 3).T
    different = np.flatnonzero(numbers == _DIFFERS).tolist()
    if different:
        _tell_of([slots[i] for i in different], parts.group.communicator.rank)
    copies: _Copies = {}
    groups: _Groups = {rule: [] for rule in RULES}
    for i in np.flatnonzero((numbers > 0) & (shapes == -negatives)).tolist():
        tensors: list[Any] = [taken[i][0] for taken in snapshots]
        rule = slots[i].rule or "mean"
        if rule == "mean" and not is_inexact(tensors[0]):
            rule = "first"
        groups[rule].append(i)
        if rule != "local":
            copies[i] = tensors
    values = _sums_of_all(parts, slots, copies, groups, label)
    for rule, op in (("min", ReduceOp.MIN), ("max", ReduceOp.MAX)):
        extremes = {i: copies[i] for i in groups[rule]}
        results = parts.ops.over_ranks.all_reduce(op, list(extremes.values()), label=label)
        values.update(zip(extremes, results, strict=True))
    _compare(parts, slots, copies, values)
    _write(slots, copies, values)
    for slot in slots:
        slot.in_step = False
    for i, tensors in copies.items():
        slots[i].settle(tensors)


def _tell_of(slots: Sequence[BufferSlot], rank: int) -> None:
    """Let rank 0 say once that forwards write `slots` from each replica's own data."""
    for slot in slots:
        slot.declare("mean")
    if rank == 0:
        names = ", ".join(slot.name for slot in slots)
        tell(
            f"forwards write {names:.200} from each rank's own data, and all ranks then get the mean of their values "
            "(of integers: the first rank's). Say on every rank how the values become one: "
            f"mpistrat.reduce_buffers(model, {slots[0].key}=…), with one of {', '.join(RULES)}"
        )


def _compare(
    parts: ModuleParts,
    slots: Sequence[BufferSlot],
    copies: _Copies,
    values: Mapping[int, torch.Tensor],
) -> None:
    """Note the buffers without a rule that this rank has written from its own data. Does nothing after the first steps.

    Such a copy differs from the result, or it is the number of this rank's examples. Copies of that number are equal if
    the ranks' parts of a batch are. A count of one example for each step is taken for a count of steps.
    """
    runs = parts.strategy.runs
    if runs >= _FIRST_STEPS or parts.replicas.records_steps:
        return
    counted = 0
    examples = parts.replicas.given_steps.examples
    if examples is not None:
        counted = examples[0] * runs
    for i, (tensor, *_) in copies.items():
        if not slots[i].rule:
            result = values[i].view(tensor.shape)
            # A mean of equal numbers of 16 bits may differ by 1 %.
            is_like = torch.allclose(tensor, result, rtol=0.02, equal_nan=True)
            is_count = counted > runs and bool((tensor == counted).all())
            slots[i].differs = is_count or not is_like


def _sums_of_all(
    parts: ModuleParts,
    slots: Sequence[BufferSlot],
    copies: _Copies,
    groups: _Groups,
    label: str,
) -> dict[int, torch.Tensor]:
    """Return the results for means, sums and first replicas' values, by the buffer's index. Collective."""
    means = groups["mean"]
    is_first = parts.group.first_replica_id == 0
    packs: list[_BytePack] = []
    contributions = []
    if parts.replicas.records_steps:  # the sum covers all replicas that run one program
        for i in means:
            sum_of_rank = parts.replicas.sum_of_rank(copies[i][0].detach())
            contributions.append([sum_of_rank])
        if groups["sum"] + groups["min"] + groups["max"]:
            raise NotImplementedError(
                "with TPUs, reduce_buffers takes mean, first and local: no sum, min and max"
            )
    else:
        contributions = [copies[i] for i in means]
        packs = _byte_packs(copies, means, groups["first"])
    for i in groups["sum"]:
        increments = [copy - slots[i].base for copy in copies[i]]
        if is_first:  # one replica sends the value that the increments are added to
            increments[0] = copies[i][0]
        contributions.append(increments)
        label += " and a sum"  # so the ranks notice if not all have declared it
    contributions += [pack.components(is_first) for pack in packs]
    totals = parts.ops.over_ranks.all_reduce(ReduceOp.SUM, contributions, label=label)
    indices = [*means, *groups["sum"]]
    values = dict(zip(indices, totals, strict=False))
    if means:
        count = parts.group.num_replicas_in_sync
        divided = torch._foreach_div(totals[: len(means)], count)
        values.update(zip(means, divided, strict=True))
    for pack, total in zip(packs, totals[len(values) :], strict=True):
        values.update(pack.values_of(total))
    if parts.replicas.records_steps:
        values.update(_broadcast(parts, copies, groups["first"], label))
    return values


# A byte that is sent as a 32-bit float takes four times its memory. So packs of more bytes are sent as they are.
_MOST_BYTES_AMONG_FLOATS = 2**16


class _BytePack:
    """A flat buffer of the bytes of a device's buffers that get the first replica's values, as int64 or as floats.

    All replicas but the first of all send zeros, so the sum over replicas has the first replica's values. An int64 is
    eight bytes, and a float is a byte, a number from 0 to 255.
    Args:
        groups: a list of buffers' indices for each dtype. The widest dtype comes first, so that each is aligned.
        copies: the tensor of each replica of this rank, by the buffer's index.
    """

    def __init__(self, groups: Sequence[Sequence[int]], copies: _Copies) -> None:
        self._groups = []
        for group in groups:
            tensors = [copies[i][0].detach() for i in group]
            self._groups.append((group, tensors))
        joined = [packing.concatenated(tensors) for _, tensors in self._groups]
        flat = torch.cat([part.view(torch.uint8) for part in joined])
        padding = flat.new_zeros(-len(flat) % 8)
        self._bytes = torch.cat([flat, padding])
        self._sent = self._bytes.view(torch.int64)
        self._replicas = len(copies[groups[0][0]])

    def send_as(self, dtype: torch.dtype) -> None:
        """Convert the bytes to floats of `dtype`, so that they are sent with other floats. Large packs stay int64.

        Args: dtype: has 16 bits or more, so that it holds each number up to 255 exactly.
        """
        if len(self._bytes) <= _MOST_BYTES_AMONG_FLOATS:
            self._sent = self._bytes.to(dtype)

    def components(self, is_first: bool) -> list[torch.Tensor]:
        """Return the contribution of each replica of this rank: the packed bytes or zeros.

        Args: is_first: whether this rank has the first replica of all. Only this replica contributes the bytes.
        """
        contributions = [torch.zeros_like(self._sent)] * self._replicas
        if is_first:
            contributions[0] = self._sent
        return contributions

    def values_of(self, total: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield pairs of a buffer's index and the first replica's values. Args: total: the sum of all contributions."""
        left = total.view(torch.uint8)
        if total.is_floating_point():
            left = total.to(torch.uint8)
        for group, like in self._groups:
            size = sum([tensor.nbytes for tensor in like])
            flat = left[:size].view(like[0].dtype)
            pieces = packing.unpack(flat, like)
            yield from zip(group, pieces, strict=True)
            left = left[size:]


def _byte_packs(copies: _Copies, means: Sequence[int], firsts: Sequence[int]) -> list[_BytePack]:
    """Return a pack of the buffers `firsts` for each device, in the widest float of `means` on the same device.

    Without floats there, or if the pack is large, it is a pack of int64.
    """
    like = {i: tensors[0] for i, tensors in copies.items()}
    groups: dict[torch.device, list[list[int]]] = {}
    alike = packing.alike(like, firsts)
    for group in sorted(alike, key=lambda group: -like[group[0]].itemsize):
        device = like[group[0]].device
        groups.setdefault(device, []).append(group)
    packs = {device: _BytePack(of_device, copies) for device, of_device in groups.items()}
    of_means = [like[i] for i in means]
    for tensor in sorted(of_means, key=lambda tensor: tensor.itemsize):
        if tensor.device in packs and tensor.is_floating_point() and tensor.itemsize > 1:
            packs[tensor.device].send_as(tensor.dtype)
    return list(packs.values())


def _broadcast(
    parts: ModuleParts, copies: _Copies, indices: Sequence[int], label: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """Broadcast rank 0's values through the host, and yield pairs of a buffer's index and values. Collective."""
    like = {i: copies[i][0].detach() for i in indices}
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
            target = tensor.detach() if slots[i].changed(tensor) else tensor.data
            targets.append(target)
            sources.append(value.view(tensor.shape))
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
