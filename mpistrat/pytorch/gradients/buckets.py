"""Dense gradients that leave while `backward()` still runs.

Gradients are cut into buckets in reverse order of the parameters: backward computes them in about this order. A bucket
leaves once all of its gradients are there and all earlier buckets have left. So all ranks send the same buckets in the
same order, whatever parameters each rank uses.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from mpistrat.communicators import SUM, Reduction
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.cross_device_ops import packing
from mpistrat.liveness.call_site import SourceLine, instead, outside
from mpistrat.pytorch.gradients.wires import Wires

# 4 MiB take 32 ms over 1 Gbit/s: long beside the cost of a message, short beside a backward that takes longer.
DEFAULT_BYTES = 1 << 22

_GRAD = operator.attrgetter("grad")


@dataclasses.dataclass(eq=False)
class Bucket:
    """A buffer for some of the gradients, side by side, of one dtype and device.

    Attributes:
        slots: slots of its parameters.
        like: its parameters on "meta".
        reduction: how it is summed up.
        parameters: its parameters while a backward runs, else empty.
        missing: ids of its parameters without a gradient so far; empty once the bucket has taken its gradients.
        flat: its memory, of shape [elements]; None until it is allocated.
        pieces: views of `flat` in the shapes of the parameters.
        writers: on a device, the streams that computed its gradients.
        ready: on a device, the events that the reduction waits for.
    """

    slots: list[int]
    like: list[torch.Tensor]
    reduction: Reduction = SUM
    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)
    missing: set[int] = dataclasses.field(default_factory=set)
    flat: Any = None
    pieces: list[Any] = dataclasses.field(default_factory=list)
    writers: set[Any] = dataclasses.field(default_factory=set)
    ready: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = sum([parameter.numel() for parameter in self.like])


def cut(slots: Sequence[int], like: Any, nbytes: int) -> list[list[int]]:
    """Cut gradients into buckets of one dtype and device.

    Args:
        slots: the slots in the expected order of gradients.
        like: the parameters by slot.
        nbytes: most bytes of a bucket. A larger gradient gets a bucket of its own.
    Returns: the slots of each bucket, in the order of full buckets.
    """
    buckets = [part for group in packing.alike(like, slots) for part in _parts(group, like, nbytes)]
    position = {slot: i for i, slot in enumerate(slots)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def _parts(group: Sequence[int], like: Any, nbytes: int) -> Iterator[list[int]]:
    part: list[int] = []
    filled = 0
    for slot in group:
        if part and filled + like[slot].nbytes > nbytes:
            yield part
            part, filled = [], 0
        part.append(slot)
        filled += like[slot].nbytes
    yield part


class Buckets:
    """The buckets of a strategy's gradients, in one backward after the other.

    Args:
        wires: how buckets cross a network.
        like: parameters on "meta", by slot, that are expected to get dense gradients; the same on all ranks.
        scale: factor of the sums, or None.
        nbytes: most bytes of a bucket.
        all_reduce: sums up a bucket, given its memory, its reduction and the events that it waits for.
        thread: calls `all_reduce`; None if the thread that fills a bucket does.

    Attributes:
        places: the bucket of a parameter, by the parameter's id.
        taken: slots of the parameters with gradients in buckets, by id.
        shown: gradients that stay in `.grad` for a hook of the program: (parameter, gradient, version), by the
            parameter's id.
        stream: returns the stream of the running backward; None on the host.
        calls: number of buckets that left in collectives of the strategy's own communicator.
    """

    stream: Callable[[], Any] | None = None

    def __init__(
        self,
        wires: Wires,
        like: Mapping[int, torch.Tensor],
        scale: float | None,
        nbytes: int,
        all_reduce: Callable[..., None],
        thread: CommunicationThread | None,
    ) -> None:
        parts = cut(list(like)[::-1], like, nbytes)
        self._buckets = [Bucket(part, [like[slot] for slot in part]) for part in parts]
        self._like, self._wires, self._scale = like, wires, scale
        self._all_reduce, self._natively = all_reduce, thread is None
        self._submit = self._call if thread is None else thread.submit

    def begin(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Begin a backward. Args: parameters: by slot; parameters that this rank has dropped are on "meta"."""
        frame = outside(sys._getframe())
        self._place = SourceLine(frame.f_code, frame.f_lineno)
        self._done: list[Future[None] | None] = []
        self._program: Any = None if self.stream is None else self.stream()
        self._sent = self.calls = 0
        self.taken: dict[int, int] = {}
        self.shown: dict[int, tuple[Any, Any, int]] = {}
        self.places: dict[int, Bucket] = {}
        for number, bucket in enumerate(self._buckets, 1):
            bucket.parameters = list(map(parameters.__getitem__, bucket.slots))
            bucket.missing = set(map(id, bucket.parameters))
            bucket.writers.clear()
            self.places.update(dict.fromkeys(bucket.missing, bucket))
            if not bucket.reduction.label or bucket.reduction.compressor is not None:
                label = f"gradients, bucket {number} of {len(self._buckets)}"
                bucket.reduction = self._wires.reduction(
                    label, self._scale, bucket.slots, natively=self._natively
                )

    def filled(self, bucket: Bucket) -> None:
        """Take the bucket's gradients, and submit all buckets that are next in order and full.

        Gradients that come later (by reentrant checkpointing of shared parameters) stay in `.grad`.
        """
        gradients: list[Any] = list(map(_GRAD, bucket.parameters))
        bucket.missing.clear()
        if bucket.flat is None:
            self._lay(bucket, gradients)
        for i, parameter in enumerate(bucket.parameters):
            if gradients[i] is None:
                gradients[i] = bucket.pieces[i].zero_()
                continue
            self.taken[id(parameter)] = bucket.slots[i]
            if gradients[i].is_sparse:
                gradients[i] = gradients[i].to_dense()
            if id(parameter) not in self.shown:
                parameter.grad = None  # frees its memory for later gradients
        if bucket.pieces is not gradients:
            torch._foreach_copy_(bucket.pieces, gradients)
        if self.stream is not None:
            bucket.ready = [self.stream().record_event()]
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            full = self._buckets[self._sent]
            self._sent += 1
            work = functools.partial(self._all_reduce, full.flat, full.reduction, *full.ready)
            self._done.append(self._submit(work, self._place))

    def _call(self, work: Callable[[], None], place: SourceLine) -> None:
        """Do `work` on this thread, as `CommunicationThread.submit` does on its own."""
        self.calls += 1
        before, instead.place = instead.place, place
        try:
            work()
        finally:
            instead.place = before

    def _lay(self, bucket: Bucket, gradients: list[Any]) -> None:
        """Find memory for `bucket`. On the host it has memory since `begin`."""

    def finish(self) -> frozenset[int]:
        """Send the remaining buckets, with zeros for missing gradients.

        Called by: a replica, when the engine has ended.
        Returns: slots of the parameters that got a gradient in a bucket on this rank.
        Raises: RuntimeError if a gradient that was kept for a hook has changed since its bucket took it.
        """
        for bucket in self._buckets:
            if bucket.missing:  # some of its gradients may come from backwards in no_sync()
                self.filled(bucket)
        for parameter, gradient, version in self.shown.values():
            if parameter.grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} changed after it was sent: it was "
                    "kept in .grad for a post-accumulate hook, and then grew once more or was written to. Use "
                    "CommunicationOptions(overlap=False)"
                )
            parameter.grad = None
        self.shown.clear()
        return frozenset(self.taken.values())

    def wait(self) -> dict[int, torch.Tensor]:
        """Wait for all buckets, and return the sums by slot, as views of the buckets.

        Raises: the error of a bucket's collective.
        """
        for done in filter(None, self._done):
            done.result()
        sums: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            sums.update(zip(bucket.slots, bucket.pieces, strict=True))
            # From here on only the program refers to its parameters and their gradients.
            bucket.parameters, bucket.flat, bucket.pieces = [], None, []
        return sums

    def leave(self) -> None:
        """Give up the buckets of a failed backward. The thread keeps their memory until its collectives have ended."""


class HostBuckets(Buckets):
    """Buckets in packs in host memory. The memory is there when a backward begins.

    Args:
        thread: carries the buckets.
        nbytes: most bytes of a bucket; 0 for `DEFAULT_BYTES`.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        packer: packing.Packer,
        wires: Wires,
        like: Mapping[int, torch.Tensor],
        scale: float | None,
        nbytes: int,
    ) -> None:
        self._packer, self._communicator = packer, thread.communicator
        all_reduce = self._communicator.all_reduce
        super().__init__(wires, like, scale, nbytes or DEFAULT_BYTES, all_reduce, thread)

    def begin(self, parameters: Mapping[int, torch.Tensor]) -> None:
        super().begin(parameters)
        # Not collective: `Overlap` has had the ranks share the window before.
        slots = list(self._like)[::-1]
        for pack in self._packer.packs(self._like, slots, self._communicator, asks=False):
            start = first = 0
            for bucket in self._buckets:
                if bucket.like[0].dtype == pack.flat.dtype:
                    bucket.flat = pack.flat[start : start + bucket.length]
                    bucket.pieces = pack.pieces[first : first + len(bucket.slots)]
                    start, first = start + bucket.length, first + len(bucket.slots)
