"""The agreement of the ranks before they reduce gradients: one MAX of a word for each parameter, and a few more."""

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

# How a gradient is laid out. The MAX over all replicas wins: a gradient that is dense on any replica is dense on all.
_SPARSE, _DENSE = 1, 2
# Dense, and the parameter got another gradient after its bucket had left.
_AGAIN = 3
_NAMED = 5  # number of parameters that a message names


class Piggyback(Protocol):
    """Adds words of this rank to the agreement, and gets their maxima over all ranks."""

    def words(self) -> np.ndarray:
        """Return this rank's int32 words; every rank gives equally many. Called by: each reduction of gradients."""
        ...

    def received(self, greatest: np.ndarray) -> None:
        """Take the maxima over all ranks, at the end of the reduction. It may be collective, and may raise."""
        ...


@dataclasses.dataclass
class ReplicaBackward:
    """A backward of one replica.

    Attributes:
        replica: number of the replica among this rank's.
        parameters: the parameters by slot; None for a dropped one.
        in_block: whether it runs inside `replica()` and not inside `run`.
        synchronizes: whether gradients are reduced; False inside `no_sync()`.
        scale: factor of the sums of gradients, or None.
        weight: factor of the loss.
        earlier: reduced gradients of earlier backwards, by slot.
        buckets: take gradients while the engine computes others; None: gradients are reduced after backward().
        came: parameters that have got a gradient, each with its version then. They must not change before the
            reduction.
        sent: slots of the gradients that `buckets` has taken.
        communicated: whether the program made collective calls inside backward(); True until it has ended.
        gradients: gradients that are not in `buckets`, by slot; None for a parameter without one.
        buffers: the replica's buffers after its forward, as of `buffers.snapshot`.
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
    """The result of the agreement; equal on all ranks.

    Attributes:
        dense: slots of the gradients that are reduced as dense tensors, ascending.
        sparse: slots of the gradients that are reduced as sparse tensors, ascending.
        again: the dense slots that got another gradient after their buckets had left.
        communicates: whether the program of any rank has communicated inside backward().
        alike: whether all ranks have used the same parameters.
        may_follow: whether `alike` holds and the MPI of every rank allows several threads: the sums need no further
            agreement.
        buffers: flags of the buffers that replicas have written, for `buffers.to_average`.
        maxima: pairs of a piggyback and the maxima of its words.
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
    """Lets the ranks agree at the end of each backward.

    Args:
        registry: the mirrored parameters and buffers.
    """

    def __init__(self, parts: ModuleParts, registry: Registry) -> None:
        self._parts, self._registry = parts, registry
        self._communicator = parts.group.communicator
        self._layouts: list[Any] = []  # of the parameters that the last backward used
        self._digest = 0  # checksum of `_layouts`

    def agree(
        self, replicas: Sequence[ReplicaBackward], extended: Any, optimizer_steps: int
    ) -> AgreedGradients:
        """Let the ranks agree on the parameters that they have used and the buffers that they have written.

        The ranks also compare their progress: calls of `run` (inside `replica()`: steps of distributed datasets),
        optimizer steps, and calls of `Strategy.shard` inside `replica()` while gradients were on. They compare the
        first arrays that `shard` got, and the layouts of the used parameters.

        Called by: every rank.
        Args:
            replicas: the backwards of this rank's replicas.
            extended: the strategy's `StrategyExtended`.
            optimizer_steps: steps that this rank has taken inside `run`.
        Raises:
            CollectiveMismatchError: the ranks are in different steps, or their parameters have different layouts.
            RuntimeError: this rank has frozen parameters that other ranks train. The other ranks hear of it.
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
        # If all ranks have the same number, MAX(n) equals -MAX(-n).
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
        """Return a line for each parameter: dtype, shape and strides.

        The device is added where gradients of GPUs and of the host go different ways.
        Args: layouts: the parameters' layouts, from `packing.layouts`.
        """
        on_devices, half = self._communicator.takes_device_buffers, len(layouts) // 2
        return "\n".join(
            f"{dtype}{list(shape)} with strides {strides}{f' on {device.type}' * on_devices}"
            for (dtype, device, shape), strides in zip(layouts[:half], layouts[half:], strict=True)
        )

    def _layouts_apart(self, layouts: Sequence[Any]) -> str:
        """Return the message that names the first parameter with different layouts. Collective."""
        of_ranks = self._communicator.all_gather_object(self._described(layouts).split("\n"))
        lines = next(rows for rows in zip(*of_ranks, strict=True) if len(set(rows)) > 1)
        described = ", ".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))
        return (
            f"backward() on rank {self._communicator.rank}: a parameter differs between the ranks ({described}), so "
            "its gradients cannot be added up. Change dtypes, shapes and memory formats of mirrored parameters on "
            "every rank alike"
        )

    def _check_not_frozen(self, numbers: Sequence[int]) -> None:
        """Check the slots `numbers`: other ranks have used them, and this rank has not.

        Raises: RuntimeError if a parameter has `requires_grad=False` here. The other ranks hear of it in their next
            collective.
        """
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
        """Return the message that lists the counts of ranks in different steps. Collective."""
        places = enumerate(self._communicator.all_gather_object(counts))
        lines = [
            f"rank {r}: run {runs}, {steps} steps, shard {n}" for r, (runs, steps, n) in places
        ]
        return (
            f"backward() on rank {self._communicator.rank}: the ranks are not in the same step, counting calls of run "
            "(inside replica() the batches of distributed datasets), optimizer steps, and calls of shard while "
            f"gradients are on ({', '.join(lines)}); a rank has skipped a backward. Call run, shard and backward() on "
            "every rank equally often; a loss of zero contributes nothing"
        )


def _kinds(replicas: Sequence[ReplicaBackward]) -> list[int]:
    """Return by slot how this rank's gradient is laid out (`_DENSE`, …); 0 if no replica used the parameter."""
    kinds = [0] * len(replicas[0].parameters)
    for backward in replicas:
        for slot, gradient in enumerate(backward.gradients):
            if gradient is not None and kinds[slot] != _DENSE:
                kinds[slot] = _SPARSE if gradient.is_sparse else _DENSE
    for slot in replicas[0].sent:
        kinds[slot] = _AGAIN if kinds[slot] else _DENSE
    return kinds
