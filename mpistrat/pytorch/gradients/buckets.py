"""Dense gradients that leave while `backward()` still runs.

They are cut into buckets in reverse order of the parameters, which is about the order in which backward makes them. A
bucket leaves once the gradients of all of its parameters are there and those before it have left; so all ranks send the
same buckets in the same order, whatever each of them uses.
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

# Of float32 over 1 Gbit/s 32 ms: long beside what a message costs, short beside a backward that takes longer.
DEFAULT_BYTES = 1 << 22

_GRAD = operator.attrgetter("grad")


@dataclasses.dataclass(eq=False)
class Bucket:
    """A part of the gradients, of one dtype and device, side by side.

    Attributes:
        slots: whose gradients it has room for.
        like: their parameters on "meta".
        reduction: how it is summed up.
        parameters: of `slots`, while a backward runs.
        missing: the ids of those whose gradients have not come yet; empty once the bucket has taken all.
        flat: its memory, of shape [elements]; None: not allocated yet.
        pieces: views of `flat`, in the shapes of the parameters.
        writers: of a bucket on a device: the streams on which its gradients have come.
        ready: of a bucket on a device: the events after which it may leave.
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
    """The slots of each bucket, in the order in which buckets are full if gradients come in the order of `slots`.

    A bucket is of one dtype and device, and has at most `nbytes`; a gradient that is larger has one of its own.
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
        like: the parameters on "meta", by slot, that are expected to get dense gradients; the same on all ranks.
        scale: multiplied to the sums, or None.
        nbytes: of a bucket, at most.
        all_reduce: sums up a bucket: its memory, how, and the events that come first.
        thread: calls `all_reduce`; None: whoever has filled the bucket.

    Attributes:
        places: by the id of a parameter, the bucket that takes its gradient.
        taken: by the id of a parameter whose gradient is in a bucket, its slot.
        shown: by the id of a parameter whose gradient stays where it is: that parameter, the gradient, its version.
        stream: gives the stream on which gradients come; None on the host.
        calls: how many buckets have left in collectives of the strategy's own communicator.
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
        """A backward begins. Args: parameters: by slot; those that this rank has dropped are on "meta"."""
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
        """`bucket` takes the gradients of its parameters, and leaves once those before it have left.

        What is accumulated after that (reentrant checkpointing of shared parameters) stays in `.grad`.
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
                parameter.grad = None  # its memory serves the gradients that come next
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
        """As `CommunicationThread.submit`, on this thread."""
        self.calls += 1
        before, instead.place = instead.place, place
        try:
            work()
        finally:
            instead.place = before

    def _lay(self, bucket: Bucket, gradients: list[Any]) -> None:
        """Find memory for `bucket`, which has none, and gets `gradients`."""

    def finish(self) -> frozenset[int]:
        """Send the rest, with zeros for what has not come. Returns the slots that got something on this rank.

        Raises: RuntimeError when a gradient has changed that a hook of the program was to see.
        """
        for bucket in self._buckets:
            if bucket.missing:  # backwards in no_sync() may have left gradients
                self.filled(bucket)
        for parameter, gradient, version in self.shown.values():
            if parameter.grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} changed after it was sent: it has a "
                    "post-accumulate hook, for which it was kept, and grew once more or was written to. Use "
                    "CommunicationOptions(overlap=False)"
                )
            parameter.grad = None
        self.shown.clear()
        return frozenset(self.taken.values())

    def wait(self) -> dict[int, torch.Tensor]:
        """The sums by slot, once all buckets are back. Raises: what a collective has raised meanwhile."""
        for done in filter(None, self._done):
            done.result()
        sums: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            sums.update(zip(bucket.slots, bucket.pieces, strict=True))
            # Nothing but the program refers to its parameters and to their gradients.
            bucket.parameters, bucket.flat, bucket.pieces = [], None, []
        return sums

    def leave(self) -> None:
        """The backward has failed: what is under way is of no use. The thread keeps the memory as long as it needs."""


class HostBuckets(Buckets):
    """Buckets in packs of the host, whose memory is there when a backward begins.

    Args:
        thread: carries them.
        packer: makes the packs.
        nbytes: 0 is `DEFAULT_BYTES`.
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
        # Not collective: the ranks have shared the window before.
        slots = list(self._like)[::-1]
        for pack in self._packer.packs(self._like, slots, self._communicator, asks=False):
            start = first = 0
            for bucket in self._buckets:
                if bucket.like[0].dtype == pack.flat.dtype:
                    bucket.flat = pack.flat[start : start + bucket.length]
                    bucket.pieces = pack.pieces[first : first + len(bucket.slots)]
                    start, first = start + bucket.length, first + len(bucket.slots)
