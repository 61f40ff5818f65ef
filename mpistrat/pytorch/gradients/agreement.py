"""What the ranks agree on before they reduce gradients: one MAX of a few words per parameter."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.communicators import Communicator, reducing
from mpistrat.errors import CollectiveMismatchError
from mpistrat.pytorch.gradients.piggyback import Piggyback
from mpistrat.pytorch.modules import buffers

# How a gradient is laid out. The MAX over all replicas wins: what is dense anywhere is dense.
_SPARSE, _DENSE = 1, 2
# Dense, and accumulated once more after its bucket had left.
_AGAIN = 3
_HEADER = 7


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Equal on all ranks.

    Attributes:
        dense, sparse: the slots whose gradients are reduced so, in ascending order.
        again: the dense slots that have got something after their buckets had left.
        communicates: the program of some rank has communicated inside backward().
        alike: all replicas have used the same parameters.
        buffers: of shape [buffers], bool: which of them are averaged.
        maxima: for each piggyback the words that it gets.
    """

    dense: list[int]
    sparse: list[int]
    again: frozenset[int]
    communicates: bool
    alike: bool
    buffers: np.ndarray
    maxima: list[np.ndarray]


def agree(
    communicator: Communicator,
    counts: tuple[int, int],
    contributions: Sequence[Sequence[Any]],
    sent: frozenset[int],
    snapshots: Sequence[buffers.Snapshot],
    piggybacks: Sequence[Piggyback],
    communicated: bool = False,
) -> Agreement:
    """Agree on what all replicas of all ranks have used and written. Called by: every rank.

    Args:
        counts: of calls of `run`, and of optimizers' steps.
        contributions: for each replica of this rank its gradients by slot.
        sent: the slots of which something has left in buckets.
        snapshots: for each replica of this rank its buffers.
        communicated: the program has, inside backward().
    Raises: CollectiveMismatchError when the ranks are not in the same step.
    """
    runs, steps = counts
    slots = len(contributions[0])
    with communicator.raising_together():
        words = [piggyback.words() for piggyback in piggybacks]
    end = _HEADER + slots + buffers.FLAGS_PER_BUFFER * len(snapshots[0])
    flags = np.concatenate([np.zeros(end, np.int32), *words])
    used, written = flags[_HEADER : _HEADER + slots], flags[_HEADER + slots : end]
    for gradients in contributions:
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                used[slot] = max(_SPARSE if gradient.is_sparse else _DENSE, used[slot])
    for slot in sent:
        used[slot] = _AGAIN if used[slot] else _DENSE
    sum_of_used = zlib.crc32((used != 0).tobytes()) >> 1
    flags[:_HEADER] = (steps, -steps, runs, -runs, communicated, sum_of_used, -sum_of_used)
    buffers.flag_written(snapshots, written)
    communicator.all_reduce(flags, reducing("max", "gradients of mirrored parameters"))
    if flags[0] != -flags[1] or flags[2] != -flags[3]:
        raise CollectiveMismatchError(_who_is_where(communicator, counts))
    return Agreement(
        np.flatnonzero(used >= _DENSE).tolist(),
        np.flatnonzero(used == _SPARSE).tolist(),
        frozenset(np.flatnonzero(used == _AGAIN).tolist()),
        bool(flags[4]),
        bool(flags[5] == -flags[6]),
        buffers.to_average(written),
        np.split(flags[end:], np.cumsum([len(own) for own in words]))[:-1],
    )


def _who_is_where(communicator: Communicator, counts: tuple[int, int]) -> str:
    everyone = communicator.all_gather_object(counts)
    described = ", ".join(
        f"rank {rank}: run {runs}, {steps} steps" for rank, (runs, steps) in enumerate(everyone)
    )
    return (
        f"backward() on rank {communicator.rank}: the ranks are not in the same step, counting calls of run (inside "
        f"replica() the batches of distributed datasets) and optimizer steps ({described}); a rank has skipped a "
        "backward. Every rank must call run and backward() as often as the others; a loss of zero contributes nothing"
    )
