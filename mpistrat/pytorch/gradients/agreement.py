"""What the ranks agree on before they reduce gradients: one MAX, of a word for each parameter and a few more."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from mpistrat.communicators import reducing
from mpistrat.cross_device_ops import packing
from mpistrat.errors import CollectiveMismatchError
from mpistrat.pytorch.modules import buffers
from mpistrat.pytorch.modules.registry import Registry
from mpistrat.replicas.torch_modules import ModuleParts

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.buckets import Buckets

# How a gradient is laid out. The MAX over all replicas wins: what is dense anywhere is dense.
_SPARSE, _DENSE = 1, 2
# Dense, and accumulated once more after its bucket had left.
_AGAIN = 3
_NAMED = 5  # parameters that a message names


class Piggyback(Protocol):
    """Adds words of this rank to the agreement, which so need no message of their own; gets their maxima."""

    def words(self) -> np.ndarray:
        """This rank's words, int32; every rank gives as many. Called at each reduction of gradients."""
        ...

    def received(self, greatest: np.ndarray) -> None:
        """Takes the maxima, on all ranks, at the end of the reduction. It may be collective, and may raise."""
        ...


@dataclasses.dataclass
class ReplicaBackward:
    """A backward of one replica.

    Attributes:
        replica: its number among those of this rank.
        parameters: by slot; None where the program has dropped one.
        in_block: inside `replica()`, and not inside `run`.
        synchronizes: whether gradients are reduced: not inside `no_sync()`.
        scale: multiplied to the sums, or None.
        weight: what the loss is multiplied by.
        earlier: by slot, the reduced gradients of earlier backwards.
        buckets: take gradients while the engine computes others; None: they are reduced afterwards.
        came: parameters that may not change any more, because their gradients have come; each with its version then.
        sent: the slots of which something has left in `buckets`.
        communicated: the program has, inside backward(); until that has ended: perhaps.
        gradients: by slot, what the replica contributes beside what was sent.
        buffers: those that the replica's forward has left.
    """

    replica: int
    parameters: list[Any]
    in_block: bool
    synchronizes: bool
    scale: float | None
    weight: float
    earlier: dict[int, torch.Tensor]
    buckets: Buckets | None
    came: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list)
    sent: frozenset[int] = frozenset()
    communicated: bool = True
    gradients: list[Any] = dataclasses.field(default_factory=list)
    buffers: buffers.Snapshot = dataclasses.field(default_factory=list)


class AgreedGradients(NamedTuple):
    """Equal on all ranks.

    Attributes:
        dense, sparse: the slots whose gradients are reduced so, in ascending order.
        again: the dense slots that have got something after their buckets had left.
        communicates: the program of some rank has communicated inside backward().
        alike: all replicas have used the same parameters.
        may_follow: they have, and the MPI of every rank allows several threads: sums need no agreement of their own.
        buffers: the flags of those that are written, for `buffers.to_average`.
        maxima: the piggybacks, and the words that each gets.
    """

    dense: list[int]
    sparse: list[int]
    again: frozenset[int]
    communicates: bool
    alike: bool
    may_follow: bool
    buffers: np.ndarray
    maxima: list[tuple[Piggyback, np.ndarray]]


class StepAgreement:
    """Has the ranks agree at the end of each backward.

    Args:
        registry: of the mirrored parameters.
    """

    def __init__(self, parts: ModuleParts, registry: Registry) -> None:
        self._parts, self._registry = parts, registry
        self._communicator = parts.group.communicator
        self._layouts: list[Any] = []  # of the parameters that were used last
        self._digest = 0  # of these

    def agree(
        self, replicas: Sequence[ReplicaBackward], extended: Any, optimizer_steps: int
    ) -> AgreedGradients:
        """Agree on what all replicas of all ranks have used and written. Called by: every rank.

        Compared are calls of `run` (inside `replica()` steps of distributed datasets), steps of optimizers, calls of
        `Strategy.shard` inside `replica()` while gradients were on, the first arrays that these were given, and the
        layouts of the parameters that were used.

        Args:
            replicas: the backwards of this rank's replicas.
            extended: the strategy's.
        Raises:
            CollectiveMismatchError: the ranks are not in the same step, or their parameters have different layouts.
            RuntimeError: this rank has frozen parameters that others train; they hear of it.
        """
        piggybacks, sharded = list(self._parts.piggybacks), extended.sharded
        counts = self._parts.strategy.runs, optimizer_steps, sharded.count
        kinds = _kinds(replicas)
        unused = np.array(kinds, np.int32) == 0
        layouts = packing.layouts(itertools.compress(replicas[0].parameters, kinds))
        if layouts != self._layouts:
            self._layouts = layouts
            self._digest = zlib.crc32(self._described(layouts).encode()) >> 1
        uses = zlib.crc32(unused.tobytes()) >> 1
        equal = np.array([*counts, sharded.first, self._digest, uses], np.int32)
        communicated = len(replicas) == 1 and replicas[0].communicated
        is_single_threaded = not self._communicator.thread_multiple
        words: list[Any] = [[communicated, is_single_threaded], equal, -equal, kinds, ()]
        if self._registry.buffers:
            words[-1] = buffers.flags_of([backward.buffers for backward in replicas])
        if piggybacks:
            with self._communicator.raising_together():
                words += [piggyback.words() for piggyback in piggybacks]
        flags = np.concatenate(words, dtype=np.int32, casting="unsafe")
        self._communicator.all_reduce(flags, reducing("max", "gradients of mirrored parameters"))
        ends = [*itertools.accumulate(map(len, words))]
        (communicates, single_threaded), equal, opposite, used, written, *maxima = np.split(
            flags, ends[:-1]
        )
        # Of equal numbers the greatest is the opposite of the greatest opposite.
        *others_differ, batches_differ, layouts_differ, uses_differ = (equal != -opposite).tolist()
        if True in others_differ:
            raise CollectiveMismatchError(self._ranks_apart(counts))
        if layouts_differ > uses_differ:
            raise CollectiveMismatchError(self._layouts_apart(layouts))
        if uses_differ:
            self._check_not_frozen(np.flatnonzero(unused & (used != 0)).tolist())
        if batches_differ or sharded.first:
            sharded.compared(same=not batches_differ)
        if not extended.given_steps.distributed:
            extended.given_steps.reduced()
        return AgreedGradients(
            np.flatnonzero(used >= _DENSE).tolist(),
            np.flatnonzero(used == _SPARSE).tolist(),
            frozenset(np.flatnonzero(used == _AGAIN).tolist()),
            bool(communicates),
            not uses_differ,
            not (uses_differ or single_threaded),
            written,
            list(zip(piggybacks, maxima, strict=True)),
        )

    def _described(self, layouts: Sequence[Any]) -> str:
        """A line for each parameter. The device counts where it decides about the way of a gradient."""
        on_devices, half = self._communicator.takes_device_buffers, len(layouts) // 2
        return "\n".join(
            f"{dtype}{list(shape)} with strides {strides}{f' on {device.type}' * on_devices}"
            for (dtype, device, shape), strides in zip(layouts[:half], layouts[half:], strict=True)
        )

    def _layouts_apart(self, layouts: Sequence[Any]) -> str:
        """The first parameter that differs. Collective."""
        of_ranks = self._communicator.all_gather_object(self._described(layouts).split("\n"))
        lines = next(rows for rows in zip(*of_ranks, strict=True) if len(set(rows)) > 1)
        described = ", ".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))
        return (
            f"backward() on rank {self._communicator.rank}: a parameter differs between the ranks ({described}): its "
            "gradients cannot be added up. Change dtypes, shapes and memory formats of mirrored parameters on every "
            "rank alike"
        )

    def _check_not_frozen(self, numbers: Sequence[int]) -> None:
        """Raises: RuntimeError: a parameter that other ranks have used is frozen here. Args: numbers: of slots."""
        slots = [self._registry.slots[number] for number in numbers]
        # A parameter that the program has dropped is not frozen.
        frozen = [s.name for s in slots if not getattr(s.reference(), "requires_grad", True)]
        if frozen:
            self._communicator.raise_together(
                RuntimeError(
                    f"rank {self._communicator.rank} has frozen {len(frozen)} parameters (requires_grad is False) that "
                    f"other ranks train, such as {', '.join(frozen[:_NAMED])}. It contributes nothing to their "
                    "gradients, which would be too small. Call requires_grad_ on every rank alike"
                )
            )

    def _ranks_apart(self, counts: tuple[int, int, int]) -> str:
        """Where each rank is. Collective."""
        places = enumerate(self._communicator.all_gather_object(counts))
        lines = [
            f"rank {r}: run {runs}, {steps} steps, shard {n}" for r, (runs, steps, n) in places
        ]
        return (
            f"backward() on rank {self._communicator.rank}: the ranks are not in the same step, counting calls of run "
            "(inside replica() the batches of distributed datasets), optimizer steps, and calls of shard while "
            f"gradients are on ({', '.join(lines)}); a rank has skipped a backward. Every rank must call run, shard "
            "and backward() as often as the others; a loss of zero contributes nothing"
        )


def _kinds(replicas: Sequence[ReplicaBackward]) -> list[int]:
    """By slot, how the gradient of this rank's replicas is laid out; 0 where none of them has used the parameter."""
    kinds = [0] * len(replicas[0].parameters)
    for backward in replicas:
        for slot, gradient in enumerate(backward.gradients):
            if gradient is not None and kinds[slot] != _DENSE:
                kinds[slot] = _SPARSE if gradient.is_sparse else _DENSE
    for slot in replicas[0].sent:
        kinds[slot] = _AGAIN if kinds[slot] else _DENSE
    return kinds
