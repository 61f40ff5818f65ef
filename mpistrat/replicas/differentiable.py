"""Collectives that torch's autograd can go back through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.context import AnyReplicaContext
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp


class _DifferentiableAllReduce(torch.autograd.Function):
    """The gradient of a sum (mean) over replicas is the sum (mean) of the upstream gradients.

    So its backward is the function itself, which has a gradient in turn.
    """

    @staticmethod
    def forward(ctx: Any, context: Any, op: Any, options: Any, label: str, *leaves: Any) -> Any:
        ctx.call = (context, op, options, label)
        return tuple(
            context.strategy.extended.replicas.all_reduce(context, op, leaves, options, label)
        )

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        context, op, options, label = ctx.call
        check_device(context, upstream)
        # Ranks that differentiate unequally often then call different collectives, which is an error.
        label = "gradient of " + (label if label.startswith("gradient of ") else "all_reduce")
        gradients = _DifferentiableAllReduce.apply(context, op, options, label, *upstream)
        return None, None, None, None, *gradients


class DifferentiableAllGather(torch.autograd.Function):
    """Each replica's gradient is its own slice of the sum of the upstream gradients."""

    @staticmethod
    def forward(ctx: Any, context: Any, axis: int, options: Any, value: torch.Tensor) -> Any:
        extended = context.strategy.extended
        gathered = extended.replicas.all_gather(context, value, axis, options)
        length = torch.tensor([value.shape[axis]], device="cpu")
        sizes = extended.replicas.all_gather(context, length, 0, options)
        # Where cores run one program, each has a number of its own.
        replica_id = arrays.as_tensor(context.replica_id_in_sync_group)
        starts = (sizes.cumsum(0) - sizes).to(replica_id.device)
        first = starts.index_select(0, replica_id.reshape(1))
        ctx.call = (context, axis, options, first, value.shape[axis])
        return gathered if extended.num_replicas_in_sync > 1 else gathered.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        context, axis, options, first, length = ctx.call
        check_device(context, [upstream])
        label = "gradient of all_gather"
        (total,) = _DifferentiableAllReduce.apply(context, ReduceOp.SUM, options, label, upstream)
        rows = first.to(total.device) + torch.arange(length, device=total.device)
        return None, None, None, total.index_select(axis, rows)


def check_device(context: AnyReplicaContext, gradients: Sequence[Any]) -> None:
    """On a GPU, autograd runs all replicas of a rank on one thread, which must not wait for itself."""
    if context.strategy.extended.replicas.count > 1 and any(map(arrays.is_on_gpu, gradients)):
        raise RuntimeError(
            "the gradient of a collective between several replicas of one rank on a GPU is not supported;"
            " start one rank per replica"
        )


def all_reduce(
    context: AnyReplicaContext,
    op: ReduceOp,
    leaves: Sequence[Any],
    options: CommunicationOptions | None,
    label: str,
) -> list[Any]:
    """`ReplicaContext.all_reduce` of tensors, at least one of which requires a gradient."""
    tensors = [i for i, leaf in enumerate(leaves) if _differentiable(leaf)]
    constant = sorted({*range(len(leaves))}.difference(tensors))
    operands = [leaves[i] for i in tensors]
    reduced = [*_DifferentiableAllReduce.apply(context, op, options, label, *operands)]
    if constant:
        others, replicas = [leaves[i] for i in constant], context.strategy.extended.replicas
        reduced += replicas.all_reduce(context, op, others, options, label)
    results = dict(zip(tensors + constant, reduced, strict=True))
    return [results[i] for i in range(len(leaves))]


def _differentiable(leaf: Any) -> bool:
    return arrays.is_torch(leaf) and (leaf.is_floating_point() or leaf.is_complex())
