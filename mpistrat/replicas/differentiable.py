"""Collectives that torch's autograd can differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.context import AnyReplicaContext
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp


class _DifferentiableAllReduce(torch.autograd.Function):
    """An all-reduce. Its gradient is the same all-reduce, SUM or MEAN, of the upstream gradients over all replicas.

    Its backward applies this function again, so that gradients of any order exist.
    """

    @staticmethod
    def forward(ctx: Any, context: Any, op: Any, options: Any, label: str, *leaves: Any) -> Any:
        ctx.call = (context, op, options, label)
        return tuple(context.replicas.all_reduce(context, op, leaves, options, label))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        context, op, options, label = ctx.call
        check_device(context, upstream)
        # With this label, ranks that differentiate unequally often get an error.
        if not label.startswith("gradient of "):
            label = "all_reduce"
        label = "gradient of " + label
        gradients = _DifferentiableAllReduce.apply(context, op, options, label, *upstream)
        return None, None, None, None, *gradients


class DifferentiableAllGather(torch.autograd.Function):
    """An all-gather of one tensor. A replica's gradient is the replica's slice of the sum of the upstream gradients."""

    @staticmethod
    def forward(ctx: Any, context: Any, axis: int, options: Any, value: torch.Tensor) -> Any:
        gathered = context.replicas.all_gather(context, value, axis, options)
        length = torch.tensor([value.shape[axis]], device="cpu")
        sizes = context.replicas.all_gather(context, length, 0, options)
        # Where several cores run one program, the replica's number is a tensor.
        replica_id = arrays.as_tensor(context.replica_id_in_sync_group)
        starts = (sizes.cumsum(0) - sizes).to(replica_id.device)
        first = starts.index_select(0, replica_id.reshape(1))
        ctx.call = (context, axis, options, first, value.shape[axis])
        if context.num_replicas_in_sync == 1:
            return gathered.clone()  # it is `value` itself, and autograd needs another tensor
        return gathered

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        context, axis, options, first, length = ctx.call
        check_device(context, [upstream])
        label = "gradient of all_gather"
        (total,) = _DifferentiableAllReduce.apply(context, ReduceOp.SUM, options, label, upstream)
        of_replica = torch.arange(length, device=total.device)
        rows = first.to(total.device) + of_replica
        return None, None, None, total.index_select(axis, rows)


def check_device(context: AnyReplicaContext, gradients: Sequence[Any]) -> None:
    """Raise RuntimeError for gradients on a GPU, if this rank has several replicas.

    Autograd runs the backwards of all replicas of a rank on one thread per GPU, so there one replica cannot wait for
    another.
    """
    if context.replicas.count > 1 and any(arrays.is_on_gpu(gradient) for gradient in gradients):
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
    """Reduce leaves over all replicas, so that torch can differentiate the results.

    Called by: `ReplicaContext.all_reduce` on every replica, for SUM and MEAN.
    Args: leaves: arrays and numbers, among them at least one tensor that requires a gradient.
    Returns: a result for each leaf, in the leaves' order.
    """
    count = len(leaves)
    tensors = [i for i, leaf in enumerate(leaves) if _differentiable(leaf)]
    constant = sorted(set(range(count)).difference(tensors))
    operands = [leaves[i] for i in tensors]
    reduced = [*_DifferentiableAllReduce.apply(context, op, options, label, *operands)]
    if constant:
        others = [leaves[i] for i in constant]
        reduced += context.replicas.all_reduce(context, op, others, options, label)
    results = dict(zip(tensors + constant, reduced, strict=True))
    return [results[i] for i in range(count)]


def _differentiable(leaf: Any) -> bool:
    return arrays.is_torch(leaf) and (leaf.is_floating_point() or leaf.is_complex())
