"""Functions for torch modules of a program: batch norm over all replicas, and buffers that forwards write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """Replace every `torch.nn.BatchNorm*d` in `module` by a `SyncBatchNorm` that normalizes over all replicas' batches.

    Call it before or after you make the optimizer, because the parameters and running statistics stay the same objects.
    Args:
        module: changed in place, unless it is itself a batch norm.
    Returns:
        `module`, or its replacement if it is itself a batch norm.
    Raises:
        ValueError: for a lazy batch norm that has not seen an input yet.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> model = ms.convert_sync_batchnorm(model)
        >>> type(model[1]).__name__
        'SyncBatchNorm'
    """
    from mpistrat.pytorch import sync_batch_norm

    return sync_batch_norm.convert_sync_batchnorm(module)


def reduce_buffers(
    module: torch.nn.Module,
    **rules: Literal["min", "max", "sum", "mean", "first", "local"],
) -> None:
    """Say how the replicas' copies of a buffer become one, if forwards write the buffer.

    `backward()`, the end of a loader, and `state_dict()` outside `run` and `replica()` make one value of the copies. A
    buffer that no forward has written is left alone.

    - "min", "max": the least or greatest value, element by element. Each costs a message for each dtype.
    - "sum": the value before, and all that the replicas have added to it. If the program itself sets the buffer between
      two steps, as it sets a counter back to 0, the sum goes on from that value.
    - "mean": the mean; for floats and complex numbers.
    - "first": the first replica's value.
    - "local": each replica keeps its own. A checkpoint holds the first rank's, and gives it to all.

    Without a rule floats get the mean, and other buffers the first replica's value. Buffers of batch norm and of
    torch.ao's observers have a rule.
    Called by: every rank, with the same arguments, before or after the strategy mirrors the module.   Context: any.
    Args:
        module: the module, or a module that contains it.
        rules: the rule, by the name of the buffer in its module. All submodules with such a buffer get the rule.
    Raises:
        ValueError: a rule is unknown, no module has such a buffer, or the rule does not fit its dtype.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> model.register_buffer("greatest", torch.tensor(0.0))
        >>> model.register_buffer("seen", torch.tensor(0))
        >>> ms.reduce_buffers(model, greatest="max", seen="sum")
    """
    from mpistrat.pytorch.modules import buffer_rules

    buffer_rules.declare(module, rules)


def may_differ(module: torch.nn.Module) -> None:
    """Say that the values of `module` may differ between ranks: no notice and no error tells of them.

    This is for models that each rank trains for itself for some steps, such as with local SGD, and for parts that
    belong to one rank. Parameters, buffers, the states of their optimizers, and the options of groups that have no
    other parameters are left out of all comparisons. A checkpoint holds the first rank's values, and gives them to all.

    Called by: every rank, before or after the strategy mirrors the module.   Context: any.
    Args:
        module: the module, with all its submodules.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> ms.may_differ(model[0])
    """
    from mpistrat.pytorch.modules import differing

    differing.declare(module)
