"""What the ranks agree on before they reduce gradients: one MAX of a few words per parameter.

`StepFacts` has what is compared, and counted for it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.communicators import Communicator, reducing
from mpistrat.errors import CollectiveMismatchError
from mpistrat.pytorch.gradients.piggyback import Piggyback
from mpistrat.pytorch.modules import buffers
from mpistrat.pytorch.modules.registry import Registry

# How a gradient is laid out. The MAX over all replicas wins: what is dense anywhere is dense.
_SPARSE, _DENSE = 1, 2
# Dense, and accumulated once more after its bucket had left.
_AGAIN = 3
_NAMED = 5  # parameters that a message names


class StepFacts(NamedTuple):
    """What a rank knows of the step that a backward belongs to. All but `first_shard` must be equal on all ranks.

    Attributes:
        runs: calls of `run`; inside `replica()` steps of distributed datasets.
        steps: of optimizers.
        shards: calls of `Strategy.shard` inside `replica()`, while gradients were on.
        first_shard: a checksum of the arrays that the first of these calls was given; 0 if it was compared before.
    """

    runs: int
    steps: int
    shards: int = 0
    first_shard: int = 0


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Equal on all ranks.

    Attributes:
        dense, sparse: the slots whose gradients are reduced so, in ascending order.
        again: the dense slots that have got something after their buckets had left.
        communicates: the program of some rank has communicated inside backward().
        alike: all replicas have used the same parameters.
        same_batches: the first arrays given to `Strategy.shard` are equal on all ranks, as far as that was compared.
        buffers: of shape [buffers], bool: which of them are averaged.
        maxima: for each piggyback the words that it gets.
    """

    dense: list[int]
    sparse: list[int]
    again: frozenset[int]
    communicates: bool
    alike: bool
    same_batches: bool
    buffers: np.ndarray
    maxima: list[np.ndarray]


class StepAgreement:
    """Has the ranks agree at the end of each backward.

    Args:
        registry: of the mirrored parameters.
    """

    def __init__(self, communicator: Communicator, registry: Registry) -> None:
        self._communicator, self._registry = communicator, registry

    def agree(
        self,
        facts: StepFacts,
        contributions: Sequence[Sequence[Any]],
        sent: frozenset[int],
        snapshots: Sequence[buffers.Snapshot],
        piggybacks: Sequence[Piggyback],
        communicated: bool = False,
    ) -> Agreement:
        """Agree on what all replicas of all ranks have used and written. Called by: every rank.

        Args:
            contributions: for each replica of this rank its gradients by slot.
            sent: the slots of which something has left in buckets.
            snapshots: for each replica of this rank its buffers.
            communicated: the program has, inside backward().
        Raises:
            CollectiveMismatchError: the ranks are not in the same step. RuntimeError: this rank has frozen parameters
                that others train; they hear of it.
        """
        with self._communicator.raising_together():
            words = [piggyback.words() for piggyback in piggybacks]
        used = _used(contributions, sent)
        unused = used == 0
        equal = np.array([*facts, zlib.crc32(unused.tobytes()) >> 1], np.int32)
        header = np.array([communicated, *equal, *-equal], np.int32)
        written = np.zeros(buffers.FLAGS_PER_BUFFER * len(snapshots[0]), np.int32)
        buffers.flag_written(snapshots, written)
        parts = [header, used, written, *words]
        flags = np.concatenate(parts)
        self._communicator.all_reduce(flags, reducing("max", "gradients of mirrored parameters"))
        ends = np.cumsum([len(part) for part in parts[:-1]])
        header, used, written, *maxima = np.split(flags, ends)
        # Where all numbers are equal, the greatest and the greatest opposite add up to 0.
        differ = header[1:].reshape(2, -1).sum(0, dtype=np.int64) > 0
        *counts_differ, batches_differ, uses_differ = differ.tolist()
        if any(counts_differ):
            raise CollectiveMismatchError(self._who_is_where(facts))
        if uses_differ:
            with self._communicator.raising_together():
                self._check_not_frozen(np.flatnonzero(unused & (used != 0)).tolist())
        return Agreement(
            np.flatnonzero(used >= _DENSE).tolist(),
            np.flatnonzero(used == _SPARSE).tolist(),
            frozenset(np.flatnonzero(used == _AGAIN).tolist()),
            bool(header[0]),
            not uses_differ,
            not batches_differ,
            buffers.to_average(written),
            maxima,
        )

    def _check_not_frozen(self, slots: Sequence[int]) -> None:
        """Raises: RuntimeError: one of `slots`, which other ranks have used, is frozen here."""
        parameters = self._registry.parameters()  # None where the program has dropped one
        frozen = [slot for slot in slots if not getattr(parameters[slot], "requires_grad", True)]
        if frozen:
            names = ", ".join(self._registry.slots[slot].name for slot in frozen[:_NAMED])
            raise RuntimeError(
                f"rank {self._communicator.rank} has frozen {len(frozen)} parameters (requires_grad is False) that "
                f"other ranks train, such as {names}. It contributes nothing to their gradients, which would be too "
                "small. Call requires_grad_ on every rank alike"
            )

    def _who_is_where(self, facts: StepFacts) -> str:
        everyone = self._communicator.all_gather_object(facts)
        described = ", ".join(
            f"rank {rank}: run {runs}, {steps} steps, shard {shards}"
            for rank, (runs, steps, shards, _) in enumerate(everyone)
        )
        return (
            f"backward() on rank {self._communicator.rank}: the ranks are not in the same step, counting calls of run "
            "(inside replica() the batches of distributed datasets), optimizer steps, and calls of shard while "
            f"gradients are on ({described}); a rank has skipped a backward. Every rank must call run, shard and "
            "backward() as often as the others; a loss of zero contributes nothing"
        )


def _used(contributions: Sequence[Sequence[Any]], sent: frozenset[int]) -> np.ndarray:
    """By slot, how the gradients of this rank's replicas are laid out; 0 of an unused parameter."""
    kinds = [
        [0 if g is None else _SPARSE if g.is_sparse else _DENSE for g in gradients]
        for gradients in contributions
    ]
    used = np.array(kinds, np.int32).max(0)
    for slot in sent:
        used[slot] = _AGAIN if used[slot] else _DENSE
    return used
