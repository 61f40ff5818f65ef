"""The agreement of the ranks before they reduce gradients: one MAX over int32 words, one word for each parameter."""

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
from mpistrat.values import by_owner

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.buckets import Buckets

# How a gradient is laid out; 0 means no gradient. The MAX over all replicas wins, so a gradient that is dense on any
# replica is dense on all.
_SPARSE = 1
_DENSE = 2
# The gradient is dense, and the parameter got another gradient after the bucket with the first one was sent.
_AGAIN = 3
_NAMED = 5  # number of parameters that a message names


class Piggyback(Protocol):
    """The interface of an object that sends a few int32 words with the agreement, and gets their maxima over all ranks.

    `ModuleParts.piggybacks` lists a strategy's piggybacks.
    """

    def words(self) -> np.ndarray:
        """Return this rank's 1-D int32 words; every rank returns equally many.

        Called by: every rank, before each reduction of gradients.
        """
        ...

    def received(self, greatest: np.ndarray) -> None:
        """Take the maxima of the words over all ranks, at the end of the reduction.

        The method may make collectives and may raise. backward() then raises its error.
        """
        ...


@dataclasses.dataclass
class ReplicaBackward:
    """The record of one `backward()` of one replica.

    A slot is the number of a mirrored parameter; slot numbers are equal on all ranks.

    Attributes:
        replica: number of the replica among this rank's replicas, from 0.
        parameters: the parameters by slot; None for a parameter that this rank has dropped.
        in_block: whether backward() runs inside `replica()` and not inside `run`.
        synchronizes: whether gradients are reduced; False inside `no_sync()`.
        scale: number that multiplies the sums of gradients: 1 / number of replicas for a mean; None for a sum.
        weight: number that multiplies the loss before the engine runs.
        earlier: gradients of earlier backwards, already reduced, by slot.
        buckets: the buffers that are sent while the engine computes further gradients; None if all gradients are
            reduced after backward().
        came: pairs of a parameter that has got a gradient, and its `_version` then. The parameter must not change
            before the reduction.
        sent: slots of the gradients that `buckets` has taken.
        communicated: whether the program made collective calls inside backward(); True until backward() has ended.
        gradients: gradients that are not in `buckets`, by slot; None for a parameter without such a gradient.
        buffers: the replica's module buffers after its forward, from `buffers.snapshot`.
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
    """The result of the agreement; equal on all ranks. A slot is the number of a mirrored parameter.

    Attributes:
        dense: slots of the gradients that are reduced as dense tensors, ascending.
        sparse: slots of the gradients that are reduced as sparse tensors, ascending.
        again: the slots in `dense` that, on some rank, got another gradient after their bucket was sent.
        communicates: whether the program of any rank made collective calls inside backward(). Always False if ranks
            have several replicas.
        alike: whether all ranks have used the same parameters.
        may_follow: whether all ranks have used the same parameters, and MPI runs with MPI_THREAD_MULTIPLE on all
            ranks. If so, the sums of dense gradients are made without a further check that all ranks make the call.
        buffers: int32 flags of the module buffers that replicas have written, for `buffers.reduce`.
        watched: the maxima of the watch's words over all ranks; zeros if no rank has sent samples.
        maxima: pairs of a piggyback and the maxima of its words over all ranks.
    """

    dense: list[int]
    sparse: list[int]
    again: frozenset[int]
    communicates: bool
    alike: bool
    may_follow: bool
    buffers: np.ndarray
    watched: np.ndarray
    maxima: list[tuple[Piggyback, np.ndarray]]


class StepAgreement:
    """Lets the ranks agree, at the end of each backward, on the gradients to reduce.

    Args:
        parts: the strategy's communicator, replicas, options and piggybacks.
        registry: the mirrored parameters and buffers.
    """

    def __init__(self, parts: ModuleParts, registry: Registry) -> None:
        self._parts = parts
        self._registry = registry
        self._communicator = parts.group.communicator
        self._layouts: list[Any] = []  # layouts of the parameters that the last backward used
        self._digest = 0  # checksum of `_layouts`

    def agree(self, replicas: Sequence[ReplicaBackward], optimizer_steps: int) -> AgreedGradients:
        """Let the ranks agree, by one all-reduce, on the used parameters and the written buffers. Collective.

        The all-reduce also compares how often each rank has called `run` (inside `replica()`: how many batches its
        distributed datasets gave), has stepped an optimizer, and has called `Strategy.shard` inside `replica()` while
        gradients were on. It compares checksums of the first arrays that `shard` got, and of the used parameters'
        dtypes, shapes and strides.

        Called by: every rank, once per backward of its replicas.
        Args:
            replicas: the backwards of this rank's replicas.
            optimizer_steps: number of optimizer steps that this rank has taken inside `run`.
        Raises:
            CollectiveMismatchError: on all ranks, if the ranks are in different steps or their used parameters have
                different layouts. A difference of the arrays of `shard` does not raise here.
            RuntimeError: this rank has frozen parameters that other ranks train. The other ranks then raise
                CollectiveMismatchError in their next collective.
        """
        piggybacks = list(self._parts.piggybacks)
        sharded = self._parts.replicas.sharded
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
        flags_of_run = [communicated, is_single_threaded]
        written: Any = ()
        if self._registry.buffers:
            written = buffers.flags_of([backward.buffers for backward in replicas])
        words: list[Any] = [flags_of_run, equal, -equal, kinds, written, self._parts.watched]
        if piggybacks:
            with self._communicator.raising_together():
                words += [piggyback.words() for piggyback in piggybacks]
        flags = np.concatenate(words, dtype=np.int32, casting="unsafe")
        self._communicator.all_reduce(flags, reducing("max", "gradients of mirrored parameters"))
        starts: list[int] = []
        length = 0
        for part in words[:-1]:
            length += len(part)
            starts.append(length)
        parts = np.split(flags, starts)
        first, equal, opposite, used, written, watched, *maxima = parts
        communicates, single_threaded = first
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
        given_steps = self._parts.replicas.given_steps
        if not given_steps.distributed:
            given_steps.reduced()
        return AgreedGradients(
            np.flatnonzero(used >= _DENSE).tolist(),
            np.flatnonzero(used == _SPARSE).tolist(),
            frozenset(np.flatnonzero(used == _AGAIN).tolist()),
            bool(communicates),
            not uses_differ,
            not (uses_differ or single_threaded),
            written,
            watched,
            list(zip(piggybacks, maxima, strict=True)),
        )

    def _described(self, layouts: Sequence[Any]) -> str:
        """Return a text with one line for each parameter: its dtype, shape and strides.

        The line ends with the type of the device if the communicator takes buffers of GPUs. Gradients of GPUs and of
        the host then travel by different transports.
        Args: layouts: the layouts of the used parameters, from `packing.layouts`.
        """
        half = len(layouts) // 2
        lines = []
        for (dtype, device, shape), strides in zip(layouts[:half], layouts[half:], strict=True):
            line = f"{dtype}{list(shape)} with strides {strides}"
            if self._communicator.takes_device_buffers:
                line += f" on {device.type}"
            lines.append(line)
        return "\n".join(lines)

    def _layouts_apart(self, layouts: Sequence[Any]) -> str:
        """Return the message with each rank's layout of the first parameter that differs between ranks. Collective."""
        of_ranks = self._communicator.all_gather_object(self._described(layouts).split("\n"))
        by_parameter = zip(*of_ranks, strict=True)
        lines = next(rows for rows in by_parameter if len(set(rows)) > 1)
        described = by_owner(lines, str, "rank")
        return (
            f"backward() on rank {self._communicator.rank}: a parameter differs between the ranks ({described}), so "
            "its gradients cannot be added up. Change dtypes, shapes and memory formats of mirrored parameters on "
            "every rank alike"
        )

    def _check_not_frozen(self, numbers: Sequence[int]) -> None:
        """Check that this rank has not frozen a parameter that other ranks have used.

        Args: numbers: slots of parameters that other ranks have used and this rank has not.
        Raises: RuntimeError if one of the parameters has `requires_grad=False`. The other ranks raise
            CollectiveMismatchError in their next collective.
        """
        slots = [self._registry.slots[number] for number in numbers]
        # A parameter that the program has dropped is not frozen.
        frozen = [s.name for s in slots if not getattr(s.reference(), "requires_grad", True)]
        if frozen:
            examples = ", ".join(frozen[:_NAMED])
            self._communicator.raise_together(
                RuntimeError(
                    f"rank {self._communicator.rank} has frozen {len(frozen)} parameters (requires_grad is False) that "
                    f"other ranks train, such as {examples}. It contributes nothing to their "
                    "gradients, which would be too small. Call requires_grad_ on every rank alike"
                )
            )

    def _ranks_apart(self, counts: tuple[int, int, int]) -> str:
        """Return the message that lists each rank's counts, because the ranks are in different steps. Collective."""
        lines = []
        of_ranks = self._communicator.all_gather_object(counts)
        for rank, (runs, steps, shards) in enumerate(of_ranks):
            lines.append(f"rank {rank}: run {runs}, {steps} steps, shard {shards}")
        return (
            f"backward() on rank {self._communicator.rank}: the ranks are not in the same step ({', '.join(lines)}; "
            "inside replica(), batches count as run); a rank has skipped a backward. Call run, shard and backward() "
            "on every rank equally often, with a loss of zero if a rank has no examples"
        )


def _kinds(replicas: Sequence[ReplicaBackward]) -> list[int]:
    """Return, by slot, `_SPARSE`, `_DENSE` or `_AGAIN` for the gradient of this rank's replicas; 0 if none used it."""
    kinds = [0] * len(replicas[0].parameters)
    for backward in replicas:
        for slot, gradient in enumerate(backward.gradients):
            if gradient is not None and kinds[slot] != _DENSE:
                kinds[slot] = _SPARSE if gradient.is_sparse else _DENSE
    for slot in replicas[0].sent:
        kinds[slot] = _AGAIN if kinds[slot] else _DENSE
    return kinds
