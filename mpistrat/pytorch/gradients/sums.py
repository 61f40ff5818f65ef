"""The sums of gradients: dense ones in packs, when `backward()` has ended; sparse ones as `IndexedSlices`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpistrat.arrays import is_on_gpu
from mpistrat.communicators import Reduction, reducing
from mpistrat.cross_device_ops.cross_device_ops import sums_of_rank
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.pytorch.gradients.buckets import cut
from mpistrat.pytorch.gradients.device_buckets import bucket_bytes, let_go
from mpistrat.pytorch.gradients.wires import Wires
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.torch_modules import ModuleParts
from mpistrat.values import PerReplica

if TYPE_CHECKING:
    from mpistrat.cross_device_ops import CrossDeviceOps
    from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
    from mpistrat.pytorch.gradients.agreement import ReplicaBackward

Gradient = torch.Tensor | None  # None where a replica has not used the parameter

_GRADIENTS = operator.attrgetter("gradients")


class DenseSums:
    """Sums up a strategy's dense gradients.

    Args:
        packer: makes the packs of gradients.
        wires: how packs cross a network.

    Attributes:
        spent: the last contributions, kept until the next backward takes their memory again. Freed all at once they
            may be the top of the heap, which glibc returns to the system: page faults were a quarter of a training
            step.
    """

    def __init__(self, parts: ModuleParts, packer: Packer, wires: Wires) -> None:
        self._packer, self._wires = packer, wires
        self._communicator = parts.group.communicator
        self._asked = parts.ops.options.bytes_per_pack
        self._sums = parts.gradient_sums or parts.ops.over_ranks
        self.spent: list[torch.Tensor] = []

    def of(self, slots: list[int], steps: list[ReplicaBackward]) -> dict[int, torch.Tensor]:
        """The sums by slot. Called by: every rank. Args: steps: the backwards of this rank's replicas."""
        step, parameters = steps[0], steps[0].parameters
        how = [*map(_GRADIENTS, steps)], functools.partial(self._reduction, step)
        if {parameters[slot].is_cpu for slot in slots} == {True}:
            self.spent = step.gradients
            return self._sums.all_reduce_packs(self._packer, parameters, slots, *how)
        return self._on_device(slots, steps, *how)

    def _on_device(
        self, slots: list[int], steps: list[ReplicaBackward], *how: Any
    ) -> dict[int, torch.Tensor]:
        """The sums of one bucket after the other."""
        step, parameters = steps[0], steps[0].parameters
        parts = [slots]
        if any(is_on_gpu(parameters[slot]) for slot in slots):
            nbytes = self._asked or bucket_bytes(map(parameters.__getitem__, slots))
            parts = cut(slots[::-1], parameters, nbytes)
        sums: dict[int, torch.Tensor] = {}
        for part in parts:
            sums |= self._sums.all_reduce_packs(self._packer, parameters, part, *how)
            if len(steps) == 1 and is_on_gpu(parameters[part[0]]):
                # The memory of these gradients serves the buckets that come next.
                let_go(map(step.gradients.__getitem__, part))
                for slot in part:
                    step.gradients[slot] = parameters[slot].grad = None
        return sums

    def _reduction(self, step: ReplicaBackward, slots: Sequence[int]) -> Reduction:
        label = f"gradients of {len(slots)} parameters"
        if not self._wires.has_format:
            return reducing("sum", label, step.scale)
        on_gpu = is_on_gpu(step.parameters[slots[0]])
        natively = on_gpu and self._communicator.ordered_by_streams
        return self._wires.reduction(label, step.scale, slots, natively=natively)


def sum_by_custom_ops(custom: CrossDeviceOps, replicas: Sequence[ReplicaBackward]) -> None:
    """Have the first replica of this rank contribute what all of them do, added up by the program's `cross_device_ops`.

    It gets the gradients of all parameters that a replica has used in one call, as it gets values of `reduce`.
    """
    slots, pairs = [], []
    first, *others = replicas
    by_slot = zip(*[replica.gradients for replica in replicas], strict=True)
    for slot, gradients in enumerate(by_slot):
        if {*map(type, gradients)} != {type(None)}:
            slots.append(slot)
            parameter = first.parameters[slot]
            pairs.append((PerReplica(_components(parameter, gradients)), parameter.detach()))
    for slot, total in zip(slots, sums_of_rank(custom, pairs), strict=True):
        if isinstance(total, IndexedSlices):
            total = as_sparse(total.indices, total.values, first.parameters[slot].shape)
        first.gradients[slot] = total
        for replica in others:
            replica.gradients[slot] = None


def sum_sparse(
    over_ranks: MpiAllReduce, slots: Iterable[int], replicas: Sequence[ReplicaBackward]
) -> dict[int, torch.Tensor]:
    """By slot, the sums of row-sparse gradients over all ranks, duplicates added up in the order of replicas.

    Collective. Args: replicas: of this rank.
    """
    sums = {}
    for slot in slots:
        parameter, scale = replicas[0].parameters[slot], replicas[0].scale
        rows = [_rows(parameter, replica.gradients[slot]) for replica in replicas]
        (total,) = over_ranks.all_reduce(ReduceOp.SUM, [rows], label="sparse gradient")
        total = as_sparse(total.indices, total.values, parameter.shape).coalesce()
        sums[slot] = total if scale is None else total * scale
    return sums


def _components(
    parameter: torch.Tensor, gradients: Sequence[Gradient]
) -> list[torch.Tensor | IndexedSlices]:
    """One for each replica: rows if all are row-sparse, else dense. A replica without a gradient contributes zeros."""
    if all(g is not None and g.is_sparse and g.sparse_dim() == 1 for g in gradients):
        return [_rows(parameter, g) for g in gradients]
    return [torch.zeros_like(parameter) if g is None else g.to_dense() for g in gradients]


def _rows(parameter: torch.Tensor, gradient: Gradient) -> IndexedSlices:
    shape = tuple(parameter.shape)
    if gradient is None:
        indices = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return IndexedSlices(parameter.new_empty((0, *shape[1:])), indices, shape)
    if gradient.sparse_dim() != 1:
        gradient = gradient.to_dense().to_sparse(1)
    gradient = gradient.coalesce()
    return IndexedSlices(gradient.values(), gradient.indices()[0], shape)


def as_sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: Any, is_coalesced: bool | None = None
) -> torch.Tensor:
    """A tensor of `shape` whose rows at `indices` are `values`, on their device."""
    how: Any = {"is_coalesced": is_coalesced, "check_invariants": False}
    return torch.sparse_coo_tensor(indices[None], values, shape, device=values.device, **how)
