"""`convert_sync_batchnorm`: batch norm over all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
