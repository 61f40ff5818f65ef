"""Collectives on XLA devices. A rank may read the results without the other ranks."""

from __future__ import annotations

from typing import Any

from mpistrat import arrays, nest, xla
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.values import DistributedValues


class StartedOps(CrossReplicaOps):
    """`CrossReplicaOps` that starts the computation of each collective's result on the device before the call ends.

    All ranks are in the call then. So a rank that reads the result later starts no graph alone, and the other ranks
    need not read theirs. No other tensor is computed. Inside a step (a call of `run`'s function) nothing starts.
    """

    def reduce(self, *args: Any) -> list[Any]:
        return _started(super().reduce(*args))

    def gather(self, value: Any, *args: Any) -> Any:
        # A gather goes through the host. Reading a value that is not started would compute all recorded operations.
        return _started(super().gather(_started(value), *args))

    def reduce_to(self, *args: Any) -> Any:
        return _started(super().reduce_to(*args))

    def batch_reduce(self, *args: Any) -> list[Any]:
        return _started(super().batch_reduce(*args))

    def aggregate(self, *args: Any) -> Any:
        return _started(super().aggregate(*args))


def _started(result: Any) -> Any:
    parts: list[Any] = []
    for leaf in nest.flatten(result):
        slices, several = isinstance(leaf, IndexedSlices), isinstance(leaf, DistributedValues)
        parts += (leaf.values, leaf.indices) if slices else leaf.values if several else (leaf,)
    xla.start().graphs.start([part for part in parts if arrays.is_on_xla(part)])
    return result
