"""Batch norm with the statistics of the batches of all replicas together."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from mpistrat.arrays import is_on_xla
from mpistrat.context import get_replica_context, get_strategy
from mpistrat.pytorch import hooks
from mpistrat.pytorch.compilation import not_compiled
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas import differentiable


def install() -> None:
    """Replace the forward of `torch.nn.SyncBatchNorm`: inside replicas it normalizes over the batches of all."""
    hooks.replace_sync_batch_norm(_forward)
    hooks.replace_update_bn(_update_bn)


@functools.wraps(hooks.original_update_bn)
def _update_bn(loader: Any, model: torch.nn.Module, device: Any = None) -> None:
    """Do torch's work, and compute the statistics of each step over the batches of all replicas.

    Steps of a distributed dataset have a part for each replica. Until the loader gives such a step, each batch norm
    looks at its own input alone: each rank may read all examples.
    """
    owner: Any = getattr(loader, "strategy", None)
    block: Any = contextlib.nullcontext()
    if hasattr(owner, "replica"):
        block = owner.replica()
    norms: list[Any] = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    with block:
        strategy = get_strategy()
        runs = strategy.runs

        def forward(norm: Any, input: torch.Tensor) -> Any:
            if strategy.runs > runs and norm.training and strategy.num_replicas_in_sync > 1:
                return _forward(norm, input)
            return type(norm).forward(norm, input)

        for norm in norms:
            norm.forward = types.MethodType(forward, norm)
        try:
            hooks.original_update_bn(loader, model, device)
        finally:
            for norm in norms:
                del norm.forward


@functools.wraps(hooks.original_sync_batch_norm)
def _forward(self: SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Normalize `input` by the mean and variance of the examples of all replicas. Each example counts equally.

    Inside a replica, in training, this is collective: every replica calls it equally often, with an empty batch if it
    has no examples. Torch's own forward runs outside replicas, in evaluation with running statistics, and if the module
    has a process group.
    Args: input: of shape [examples, channels, ...].
    Returns: a tensor of the shape and dtype of `input`.
    Raises: ValueError if all replicas together have at most one value per channel. On XLA devices the result is NaN
        instead.
    """
    context = get_replica_context()  # at top level the default strategy's, of one replica
    batch_statistics = self.training or self.running_mean is None
    is_alone = context is None or context.num_replicas_in_sync == 1
    if is_alone or not batch_statistics or getattr(self, "process_group", None) is not None:
        return hooks.original_sync_batch_norm(self, input)
    self._check_input_dim(input)
    with torch.no_grad():
        mean, variance, count = _statistics(context, input)
        # A replica with more than 1 value per channel need not read `count`: a read would wait for the device.
        has_few_values = input.numel() <= input.shape[1]
        if has_few_values and not is_on_xla(input) and count <= 1:
            raise ValueError(
                "SyncBatchNorm needs more than 1 value per channel over all replicas to train, got "
                f"{int(count)}; this replica's input has shape {list(input.shape)}"
            )
        _update_statistics(self, mean, variance * (count / (count - 1)))
        rate = torch.rsqrt(variance + self.eps)
    return _normalized(context, input, self.weight, self.bias, mean, rate, count, self.eps)


def _statistics(
    context: Any, input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and variance of each channel over all replicas, and the number of values per channel. Collective.

    The replicas gather their own means and variances in one message. They are combined by the formulae of Chan, Golub
    and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), because a mean of
    squares would lose digits by cancellation.
    Returns: mean and variance of shape [channels], in float32 or wider; and the count, a tensor of one number. The
        variance is divided by the count, not by count - 1.
    """
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    axes = _axes(x)
    elements = x.numel() // x.shape[1]
    if is_on_xla(x):
        return _statistics_of_sums(context, x, axes, elements)
    statistics = x.new_zeros(2 * x.shape[1] + 1)
    if elements:
        mean = x.mean(axes)
        variance = (x - mean.view(_shape(x))).square().mean(axes)  # faster than torch.var_mean
        statistics = torch.cat([mean, variance, x.new_full((1,), elements)])
    gathered = context.all_gather(statistics[None], axis=0)
    channels = x.shape[1]
    means, variances, counts = gathered.split([channels, channels, 1], dim=1)
    count = counts.sum(0)
    weights = counts / count
    mean = (means * weights).sum(0)
    squares = variances + (means - mean).square()
    variance = (squares * weights).sum(0)
    return mean, variance, count


def _statistics_of_sums(
    context: Any, x: torch.Tensor, axes: list[int], elements: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, variance and count like `_statistics`, by two all-reduces. Collective.

    XLA devices compute all-reduces without the host.

    Args:
        axes: all axes of `x` but the channels'.
        elements: number of values per channel in `x`.
    """
    own_count = x.new_full((1,), elements)
    own_sums = torch.cat([x.sum(axes), own_count])
    sums = context.all_reduce(ReduceOp.SUM, own_sums)
    count = sums[-1]
    mean = sums[:-1] / count
    own_squares = (x - mean.view(_shape(x))).square().sum(axes)
    squares = context.all_reduce(ReduceOp.SUM, own_squares)
    return mean, squares / count, count


class _Normalized(torch.autograd.Function):
    """Computes (input - mean) · rate · weight + bias. `mean` and `rate` (1 / standard deviation) are of all replicas.

    The gradient includes the effect of each replica's input on the mean and variance of all replicas. If `input` needs
    a gradient, the backward makes one all-reduce. With `create_graph=True` it makes two more, so that the gradient has
    a gradient. The gradients of weight and bias are this replica's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        context: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        rate: torch.Tensor,
        count: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        ctx.context = context
        ctx.eps = eps
        ctx.save_for_backward(input, weight, mean, rate, count)
        shape = _shape(input)
        scale = rate if weight is None else rate * weight
        output = input.to(mean.dtype) - mean.view(shape)
        output.mul_(scale.view(shape))
        if bias is not None:
            output.add_(bias.view(shape))
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        input, weight, mean, rate, count = ctx.saved_tensors
        shape = _shape(input)
        axes = _axes(input)

        replicas = ctx.context.replicas
        label = "gradient of SyncBatchNorm"
        has_graph = torch.is_grad_enabled()  # with create_graph=True
        all_reduce = differentiable.all_reduce if has_graph else replicas.all_reduce

        def mean_of_all(sums: torch.Tensor) -> torch.Tensor:
            differentiable.check_device(ctx.context, [sums])
            (total,) = all_reduce(ctx.context, ReduceOp.SUM, [sums], None, label)
            return total / count

        x = input.to(mean.dtype)
        if has_graph:  # the graph must contain the statistics, as functions of the input
            mean = mean_of_all(x.sum(axes))
            variance = mean_of_all((x - mean.view(shape)).square().sum(axes))
            rate = torch.rsqrt(variance + ctx.eps)
        normalized = (x - mean.view(shape)).mul_(rate.view(shape))
        upstream = upstream.to(mean.dtype)
        sum_of_upstream = upstream.sum(axes)
        sum_of_products = (upstream * normalized).sum(axes)
        of_input = None
        if ctx.needs_input_grad[1]:
            sums = torch.stack([sum_of_upstream, sum_of_products])
            constant, slope = mean_of_all(sums).view(2, *shape)
            scale = rate if weight is None else rate * weight
            of_input = normalized.clone() if has_graph else normalized
            of_input = of_input.mul_(-slope).add_(upstream).sub_(constant)
            of_input.mul_(scale.view(shape))
        _, _, weight_too, bias_too, *rest = ctx.needs_input_grad
        of_bias = sum_of_upstream if bias_too else None
        of_weight = sum_of_products if weight_too else None
        return None, of_input, of_weight, of_bias, *[None] * len(rest)


@not_compiled  # its backward communicates
def _normalized(*operands: Any) -> torch.Tensor:
    return _Normalized.apply(*operands)


def _axes(x: torch.Tensor) -> list[int]:
    """Return all axes of `x` but the channels' axis, 1."""
    return [0, *range(2, x.dim())]


def _shape(x: torch.Tensor) -> list[int]:
    """Return the shape [1, channels, 1, …] as [1, -1, 1, …], so that a vector of channels broadcasts against `x`."""
    return [1, -1, *[1] * (x.dim() - 2)]


@torch.no_grad()
def _update_statistics(self: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update the running mean and variance by this batch's, as torch's batch norm does. Does nothing in evaluation.

    Args: variance: unbiased, of shape [channels].
    """
    if not self.training or not self.track_running_stats:
        return
    self.num_batches_tracked.add_(1)
    weight = self.momentum
    if weight is None:
        weight = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
    self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
    self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """Replace every batch norm inside `module`, in place, by a `SyncBatchNorm`.

    Called by: `mpistrat.convert_sync_batchnorm`.
    Returns: `module`; or its `SyncBatchNorm` if `module` itself is a batch norm.
    Raises: ValueError if a lazy batch norm has not seen an input, so that its number of channels is unknown.
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        if isinstance(module, LazyModuleMixin):
            raise ValueError(
                f"convert_sync_batchnorm: {type(module).__name__} does not know its channels yet; "
                "convert after the first forward"
            )
        converted: torch.nn.Module = SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    for name, child in module.named_children():
        converted = convert_sync_batchnorm(child)
        if converted is not child:  # an assignment counts as a new module of the scope
            setattr(module, name, converted)
    return module
