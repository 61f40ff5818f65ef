"""Gradients as values that replicas reduce: sparse ones are `IndexedSlices`, which no pack takes."""

from __future__ import annotations

from collections.abc import Sequence
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

Gradient = torch.Tensor | None  # None where a replica has not used the parameter


def sum_by_custom_ops(custom: CrossDeviceOps, everyone: Sequence[ReplicaBackward]) -> None:
    """Have the first replica of this rank contribute what all of them do, added up by the program's `cross_device_ops`.

    It gets the gradients of all parameters that a replica has used in one call, as it gets values of `reduce`.
    """
    slots, pairs = [], []
    first, *others = everyone
    for slot, parameter in enumerate(first.parameters):
        gradients = [step.gradients[slot] for step in everyone]
        if parameter is not None and any(g is not None for g in gradients):
            slots.append(slot)
            pairs.append((PerReplica(_components(parameter, gradients)), parameter.detach()))
    for slot, total in zip(slots, sums_of_rank(custom, pairs), strict=True):
        if isinstance(total, IndexedSlices):
            total = as_sparse(total.indices, total.values, first.parameters[slot].shape)
        first.gradients[slot] = total
        for step in others:
            step.gradients[slot] = None


def sum_rows(
    over_ranks: MpiAllReduce, parameter: torch.Tensor, gradients: Sequence[Gradient]
) -> torch.Tensor:
    """The sum of row-sparse gradients over all replicas of all ranks, duplicates added up in the order of replicas.

    Collective. Args: gradients: of this rank's replicas.
    """
    own = [_rows(parameter, gradient) for gradient in gradients]
    (total,) = over_ranks.all_reduce(ReduceOp.SUM, [own], label="sparse gradient")
    return as_sparse(total.indices, total.values, parameter.shape).coalesce()


def _components(
    parameter: torch.Tensor, gradients: Sequence[Gradient]
) -> list[torch.Tensor | IndexedSlices]:
    """One for each replica: rows if all are row-sparse, else dense. A replica without a gradient contributes zeros."""
    if all(g is not None and g.is_sparse and g.sparse_dim() == 1 for g in gradients):
        return [_rows(parameter, g) for g in gradients]
    zeros = torch.zeros_like(parameter) if None in gradients else parameter
    return [zeros if g is None else g.to_dense() if g.is_sparse else g for g in gradients]


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
