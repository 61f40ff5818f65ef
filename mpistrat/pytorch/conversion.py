"""Batch norm over all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """Replace every `torch.nn.BatchNorm*d` in `module` by one over the batches of all replicas.

    Call it before making the optimizer or after: parameters and running statistics are kept.
    Args:
        module: changed in place, unless it is itself a batch norm.
    Returns:
        `module`, or its replacement.
    Raises:
        ValueError: a lazy batch norm that has not seen an input yet.
    """
    from mpistrat.pytorch import sync_batch_norm

    return sync_batch_norm.convert_sync_batchnorm(module)
