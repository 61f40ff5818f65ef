"""Dense gradients that are sent to the other ranks while `backward()` still runs.

A bucket is a buffer of several gradients that are summed up in one message. Buckets are filled in reverse order of the
parameters, because backward() computes gradients in about this order. A bucket is sent once all of its gradients are
there and all earlier buckets have been sent. So all ranks send the same buckets in the same order, even if ranks use
different parameters.
"""

from __future__ import annotations

import dataclasses
import functools
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

# 4 MiB take 34 ms over 1 Gbit/s. That is long beside the fixed cost of a message, and short beside a long backward.
DEFAULT_BYTES = 1 << 22


@dataclasses.dataclass(eq=False)
class Bucket:
    """A buffer that holds several gradients of one dtype and device side by side, and is reduced in one message.

    Attributes:
        slots: slots (numbers) of the bucket's parameters.
        like: the parameters on the device "meta", without memory.
        reduction: the sum, its scale and its label. The default is set anew by `Buckets.begin`.
        parameters: the parameters while a backward runs; else empty.
        missing: `id`s of the parameters without a gradient so far; empty once the bucket has taken its gradients.
        flat: the bucket's memory, of shape [elements]; None until it is allocated.
        pieces: views of `flat`, one in the shape of each parameter.
        writers: on an accelerator, the streams that computed the gradients; empty on the host.
        ready: on an accelerator, the one event that the reduction waits for; empty on the host.
        length: number of elements of all gradients.
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
    """Divide gradients into buckets. The gradients of a bucket have one dtype and device.

    Args:
        slots: the parameters' slots in the order that backward() is expected to compute their gradients in.
        like: the parameters by slot.
        nbytes: the most bytes of a bucket. A larger gradient gets a bucket to itself.
    Returns: a list of slots for each bucket. The bucket that is expected to be full first comes first.
    """
    buckets: list[list[int]] = []
    for group in packing.alike(like, slots):
        buckets.extend(_parts(group, like, nbytes))
    position = {slot: i for i, slot in enumerate(slots)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def _parts(group: Sequence[int], like: Any, nbytes: int) -> Iterator[list[int]]:
    part: list[int] = []
    filled = 0
    for slot in group:
        if part and filled + like[slot].nbytes > nbytes:
            yield part
            part = []
            filled = 0
        part.append(slot)
        filled += like[slot].nbytes
    yield part


class Buckets:
    """All buckets of a strategy's gradients, for many backwards: `begin`, `filled` for each bucket, `finish`, `wait`.

    Args:
        wires: make each bucket's reduction, with the wire format (the shorter numbers that cross a network).
        like: the parameters that are expected to get dense gradients, on the device "meta", by slot; the same on all
            ranks.
        scale: number that multiplies the sums; None for plain sums.
        nbytes: the most bytes of a bucket.
        all_reduce: a function that sums up a bucket over the ranks, in place. It gets the bucket's memory, reduction
            and, on an accelerator, the event that it waits for.
        thread: the thread that calls `all_reduce`; None if the thread that fills a bucket calls it.

    Attributes:
        places: the bucket of each parameter, by the parameter's `id`.
        taken: slots of the parameters with gradients in buckets in this backward, by the parameter's `id`.
        shown: gradients that also stay in `.grad`, because a hook of the program will read them: (parameter, gradient,
            version), by the parameter's `id`.
        stream: a function that returns the accelerator's current stream; None on the host.
        calls: number of buckets in this backward that were summed up by collectives of the strategy's communicator,
            and not by `thread`.
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
        self._like = like
        self._wires = wires
        self._scale = scale
        self._all_reduce = all_reduce
        self._natively = thread is None
        self._submit = self._call if thread is None else thread.submit

    def begin(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Begin a backward: set `places`, and note that all gradients of all buckets are missing.

        Args: parameters: the parameters by slot; a parameter that this rank has dropped is on the device "meta".
        """
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
        """Copy the gradients of `bucket` into its memory, then send all full buckets that are next in order.

        `.grad` of its parameters becomes None, unless a hook of the program will read the gradient. A parameter
        without a gradient contributes zeros. Gradients that come later (by reentrant checkpointing of shared
        parameters) stay in `.grad`.
        Called by: the hook of the last missing gradient; `finish`, for buckets that lack gradients.
        """
        gradients: list[Any] = [parameter.grad for parameter in bucket.parameters]
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
        """Call `work` on this thread, while reports name `place` as the line of the program that called it."""
        self.calls += 1
        before = instead.place
        instead.place = place
        try:
            work()
        finally:
            instead.place = before

    def _lay(self, bucket: Bucket, gradients: list[Any]) -> None:
        """Set `bucket.flat` and `bucket.pieces`. Does nothing on the host, where `begin` has set them."""

    def finish(self) -> frozenset[int]:
        """Send the buckets that are not sent yet, with zeros for missing gradients. Does not wait for the sums.

        Called by: the rank's replica, when the autograd engine has ended.
        Returns: slots of the parameters with gradients in buckets on this rank.
        Raises: RuntimeError if a gradient that stayed in `.grad` for a hook has changed since its bucket took it.
        """
        for bucket in self._buckets:
            if bucket.missing:  # its gradients may come from earlier backwards, in no_sync(): no hook was called now
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
        """Wait until all buckets are summed up.

        Returns: the sums by slot, as views of the buckets' memory. The buckets give that memory up.
        Raises: the error of the first bucket in order that failed.
        """
        for done in self._done:
            if done is not None:
                done.result()
        sums: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            sums.update(zip(bucket.slots, bucket.pieces, strict=True))
            # The buckets must not keep the program's parameters and gradients alive.
            bucket.parameters = []
            bucket.flat = None
            bucket.pieces = []
        return sums

    def leave(self) -> None:
        """Give up the buckets of a failed backward. Does not wait for collectives that still use their memory."""


class HostBuckets(Buckets):
    """Buckets in host memory. `begin` cuts them out of one pack (a flat buffer) for each dtype.

    Args:
        thread: the thread that sums up the buckets.
        packer: makes the packs, in the window (shared memory of the node's ranks) if there is room.
        nbytes: the most bytes of a bucket; 0 for `DEFAULT_BYTES`.
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
        self._packer = packer
        self._communicator = thread.communicator
        all_reduce = self._communicator.all_reduce
        super().__init__(wires, like, scale, nbytes or DEFAULT_BYTES, all_reduce, thread)

    def begin(self, parameters: Mapping[int, torch.Tensor]) -> None:
        super().begin(parameters)
        # With `asks=False` the call is not collective: `Overlap` has already had the ranks make a large enough window.
        slots = list(self._like)[::-1]
        for pack in self._packer.packs(self._like, slots, self._communicator, asks=False):
            start = 0
            first = 0
            for bucket in self._buckets:
                if bucket.like[0].dtype == pack.flat.dtype:
                    end = start + bucket.length
                    last = first + len(bucket.slots)
                    bucket.flat = pack.flat[start:end]
                    bucket.pieces = pack.pieces[first:last]
                    start = end
                    first = last
