"""Which part of a global batch is whose."""

from __future__ import annotations

from typing import Any

from mpistrat.values import regroup


def slice_bounds(batch_size: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """Replica i's part of a global batch: pieces of ceil(batch / replicas), the last ones short or empty."""
    share = -(-batch_size // num_replicas)
    return min(replica * share, batch_size), min((replica + 1) * share, batch_size)


def regroup_batches(batches: list[Any]) -> Any:
    """One step of this rank: the batches of its replicas, or the batch itself if there is one replica."""
    return batches[0] if len(batches) == 1 else regroup(batches)
