"""Batch norm whose statistics are those of the batches of all replicas together."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from mpistrat.arrays import is_on_xla
from mpistrat.context import get_replica_context, has_strategy
from mpistrat.pytorch import hooks
from mpistrat.reduce_op import ReduceOp


def install() -> None:
    """Have `torch.nn.SyncBatchNorm` normalize over the replicas where some run together."""
    hooks.replace_sync_batch_norm(_forward)


@functools.wraps(hooks.original_sync_batch_norm)
def _forward(self: SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Over the examples of all replicas, each counted once, however many a replica has.

    Inside `run` and in training, every replica calls it equally often, with an empty batch if it has no examples.
    Elsewhere, and with a process group of torch's of its own, it is torch's. The input is [examples, channels, ...].
    Raises: ValueError, where all replicas together have one value per channel; on XLA devices the result is NaN.
    """
    context = get_replica_context() if has_strategy() else None
    batch_statistics = self.training or self.running_mean is None
    if (
        context is None
        or context.num_replicas_in_sync == 1
        or not batch_statistics
        or self.process_group is not None
    ):
        return hooks.original_sync_batch_norm(self, input)
    self._check_input_dim(input)
    return _normalize(self, context, input)


def _normalize(self: SyncBatchNorm, context: Any, input: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(input.dtype, torch.float32)
    x = input.to(dtype)
    axes = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    elements = x.new_full((1,), x.numel() // x.shape[1])
    sums = context.all_reduce(ReduceOp.SUM, torch.cat([x.sum(axes), elements]))
    count = sums[-1].detach()
    if not is_on_xla(x) and count <= 1:  # there it has not been computed yet
        raise ValueError(
            f"SyncBatchNorm needs more than 1 value per channel over all replicas to train, got {int(count)}; "
            f"this replica's input has shape {list(input.shape)}"
        )
    mean = sums[:-1] / count
    centered = x - mean.view(shape)
    variance = context.all_reduce(ReduceOp.SUM, centered.square().sum(axes)) / count
    _update_statistics(self, mean, variance * (count / (count - 1)))
    scale = torch.rsqrt(variance + self.eps)
    if self.weight is not None:
        scale = scale * self.weight
    output = centered * scale.view(shape)
    if self.bias is not None:
        output = output + self.bias.view(shape)
    return output.to(input.dtype)


@torch.no_grad()
def _update_statistics(self: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Move the running statistics towards this batch's, as torch's batch norm does."""
    if not self.training or not self.track_running_stats:
        return
    self.num_batches_tracked.add_(1)
    weight = self.momentum
    if weight is None:
        weight = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
    self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
    self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """The work of `mpistrat.convert_sync_batchnorm`."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _converted(module)
    for name, child in module.named_children():
        converted = convert_sync_batchnorm(child)
        if converted is not child:
            setattr(module, name, converted)
    return module


def _converted(module: _BatchNorm) -> SyncBatchNorm:
    if isinstance(module, LazyModuleMixin):
        raise ValueError(
            f"convert_sync_batchnorm: {type(module).__name__} does not know its channels yet; "
            "convert after the first forward"
        )
    converted = SyncBatchNorm(
        module.num_features,
        module.eps,
        module.momentum,
        affine=False,
        track_running_stats=False,
    )
    converted.affine, converted.track_running_stats = module.affine, module.track_running_stats
    for name in ("weight", "bias"):
        converted.register_parameter(name, getattr(module, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        converted.register_buffer(name, getattr(module, name))
    return converted.train(module.training)
