"""Sums of gradients that are not packed: by a program's own `cross_device_ops`, and of sparse gradients."""

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
    """Add up the gradients of this rank's replicas by the program's `cross_device_ops`.

    The sums replace the first replica's gradients. The gradients of the other replicas become None.
    Args:
        custom: gets the gradients of all parameters that any of the replicas used in one call, as `PerReplica` values
            with the parameter as destination.
        replicas: the backwards of this rank's replicas; their `gradients` are changed in place.
    """
    slots = []
    pairs = []
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
    """Sum up sparse gradients over all replicas of all ranks. Collective.

    Rows with the same index are added up in the order of replicas.
    Args:
        over_ranks: gathers the rows of all ranks.
        slots: slots (numbers) of the parameters, in the same order on all ranks.
        replicas: the backwards of this rank's replicas. A replica without a gradient contributes no rows.
    Returns: the sums by slot: coalesced sparse COO tensors, multiplied by the backward's `scale`.
    """
    sums = {}
    for slot in slots:
        parameter = replicas[0].parameters[slot]
        scale = replicas[0].scale
        rows = [_rows(parameter, replica.gradients[slot]) for replica in replicas]
        (total,) = over_ranks.all_reduce(ReduceOp.SUM, [rows], label="sparse gradient")
        total = as_sparse(total.indices, total.values, parameter.shape).coalesce()
        sums[slot] = total if scale is None else total * scale
    return sums


def _components(
    parameter: torch.Tensor, gradients: Sequence[Gradient]
) -> list[torch.Tensor | IndexedSlices]:
    """Return each replica's gradient of `parameter`: `IndexedSlices` if all gradients are row-sparse, else all dense.

    Args: gradients: one for each replica of this rank; None counts as dense zeros.
    """
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
    """Return a sparse COO tensor of `shape`, on the device of `values`.

    Args:
        indices: row numbers, of shape [rows].
        values: the rows, of shape [rows, …].
        is_coalesced: True if the rows are ascending and unique; None if that is not known.
    """
    how: Any = {"is_coalesced": is_coalesced, "check_invariants": False}
    return torch.sparse_coo_tensor(indices[None], values, shape, device=values.device, **how)
