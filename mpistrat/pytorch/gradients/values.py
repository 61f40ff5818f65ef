"""Gradients as the values that replicas reduce. Sparse gradients are `IndexedSlices`, which packs do not take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpistrat.cross_device_ops.cross_device_ops import sums_of_rank
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.reduce_op import ReduceOp
from mpistrat.values import PerReplica

if TYPE_CHECKING:
    from mpistrat.cross_device_ops import CrossDeviceOps
    from mpistrat.cross_device_ops.all_reduce import MpiAllReduce
    from mpistrat.pytorch.gradients.agreement import ReplicaBackward

Gradient = torch.Tensor | None  # None if a replica has not used the parameter


def sum_by_custom_ops(custom: CrossDeviceOps, replicas: Sequence[ReplicaBackward]) -> None:
    """Add up the gradients of this rank's replicas by the program's `cross_device_ops`, into the first replica's.

    `custom` gets the gradients of all used parameters in one call, like values of `reduce`. The other replicas then
    have no gradients.
    """
    slots, pairs = [], []
    first, *others = replicas
    by_slot = zip(*[replica.gradients for replica in replicas], strict=True)
    for slot, gradients in enumerate(by_slot):
        if any(gradient is not None for gradient in gradients):
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
    """Return the sums of row-sparse gradients over all ranks by slot, coalesced. Collective.

    Duplicate rows are added up in the order of replicas.
    Args: replicas: the backwards of this rank's replicas.
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
    """Return each replica's gradient, zeros for None: `IndexedSlices` if all are row-sparse, else dense."""
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
    """Return a sparse COO tensor of `shape` with the rows `values` at `indices`, on the device of `values`."""
    how: Any = {"is_coalesced": is_coalesced, "check_invariants": False}
    return torch.sparse_coo_tensor(indices[None], values, shape, device=values.device, **how)
