"""Dense gradients that leave while `backward()` still runs.

They are cut into buckets in reverse order of the parameters, which is about the order in which backward makes them. A
bucket leaves once the gradients of all of its parameters are there and those before it have left; so all ranks send the
same buckets in the same order, whatever each of them uses.
"""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from mpistrat.communicators import Reduction
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.cross_device_ops import packing
from mpistrat.liveness.call_site import outside
from mpistrat.pytorch.gradients.wires import Wires

# Of float32 over 1 Gbit/s 32 ms: long beside what a message costs, short beside a backward that takes longer.
DEFAULT_BYTES = 1 << 22


class Bucket:
    """A part of the gradients, of one dtype and device, side by side.

    Attributes:
        parameters: by slot, those whose gradients it has room for.
        missing: the slots whose gradients have not come yet.
        flat: its memory, of shape [elements]; None: not allocated yet.
        pieces: views of `flat`, by slot, in the shapes of the parameters.
        writers: of a bucket on a device: the streams that write to it.
    """

    def __init__(self, parameters: dict[int, torch.Tensor]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        self.flat: Any = None
        self.pieces: dict[int, torch.Tensor] = {}
        self.writers: list[Any] = []

    def lies_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Have `flat` as its memory. Returns: `flat`."""
        pieces = packing.pieces_of(flat, list(self.parameters.values()))
        self.flat, self.pieces = flat, dict(zip(self.parameters, pieces, strict=True))
        return flat


def cut(slots: Sequence[int], like: Sequence[Any], nbytes: int) -> list[list[int]]:
    """The slots of each bucket, in the order in which buckets are full if gradients come in the order of `slots`.

    A bucket is of one dtype and device, and has at most `nbytes`; a gradient that is larger has one of its own.
    """
    buckets = [part for group in packing.alike(like, slots) for part in _parts(group, like, nbytes)]
    position = {slot: i for i, slot in enumerate(slots)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def _parts(group: Sequence[int], like: Sequence[Any], nbytes: int) -> Iterator[list[int]]:
    part: list[int] = []
    filled = 0
    for slot in group:
        size = like[slot].numel() * like[slot].element_size()
        if part and filled + size > nbytes:
            yield part
            part, filled = [], 0
        part.append(slot)
        filled += size
    yield part


class Buckets(abc.ABC):
    """The buckets of one backward.

    Args:
        buckets: in the order in which they leave.
        wires: how buckets cross a network.
        scale: multiplied to the sums, or None.
        natively: as of `Wires.reduction`.

    Attributes:
        sent: how many have left.
        calls: how many of these in collectives of the strategy's own communicator.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        wires: Wires,
        scale: float | None,
        *,
        natively: bool = False,
    ) -> None:
        self.buckets, self._wires, self._scale, self._natively = buckets, wires, scale, natively
        self.sent = self.calls = 0
        self._places = {
            id(parameter): (bucket, slot)
            for bucket in buckets
            for slot, parameter in bucket.parameters.items()
        }
        self._shown: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def arrived(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter has been accumulated: it is taken if a bucket has room for it.

        What is accumulated after that (reentrant checkpointing of shared parameters) stays in `.grad`.
        """
        bucket, slot = self._places.get(id(parameter), (None, -1))
        if bucket is None or slot not in bucket.missing or parameter.grad is None:
            return
        self._take(bucket, slot, parameter, parameter.grad)
        while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
            self._send(*self._next())

    def finish(self) -> frozenset[int]:
        """Send the rest, with zeros for what has not come. Returns the slots that got something on this rank.

        Raises: RuntimeError when a gradient has changed that a hook of the program was to see.
        """
        slots: set[int] = set()
        for i, bucket in enumerate(self.buckets):
            slots.update(bucket.parameters)
            for slot in list(bucket.missing):
                parameter = bucket.parameters[slot]
                if parameter.grad is None:  # backwards in no_sync() may have left a gradient
                    self._room(bucket, slot).zero_()
                    slots.remove(slot)
                else:
                    self._take(bucket, slot, parameter, parameter.grad)
            if i == self.sent:
                self._send(*self._next())
        for parameter, gradient, version in self._shown:
            if parameter.grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} changed after it was sent: it has a "
                    "post-accumulate hook, for which it was kept, and grew once more or was written to. Use "
                    "CommunicationOptions(overlap=False)"
                )
            parameter.grad = None
        return frozenset(slots)

    @abc.abstractmethod
    def wait(self) -> dict[int, torch.Tensor]:
        """The sums by slot, once all buckets are back. Raises: what a collective has raised meanwhile."""

    @abc.abstractmethod
    def leave(self) -> None:
        """The backward has failed: what is under way is of no use."""

    def _take(
        self, bucket: Bucket, slot: int, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        is_shown = len(parameter._post_accumulate_grad_hooks) > 1
        if is_shown or not self._adopt(bucket, parameter, gradient):
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self._room(bucket, slot).copy_(dense)
        if is_shown:
            # The program has a hook, too, which will look at the gradient.
            self._shown.append((parameter, gradient, gradient._version))
        else:
            parameter.grad = None  # its memory serves the gradients that come next
        bucket.missing.discard(slot)

    def _adopt(self, bucket: Bucket, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether the bucket lies in the memory of `gradient` from now on: then nothing is copied."""
        return False

    @abc.abstractmethod
    def _room(self, bucket: Bucket, slot: int) -> torch.Tensor:
        """Where the gradient of `slot` goes."""

    def _next(self) -> tuple[Bucket, Reduction]:
        """The bucket that leaves next, and how it is summed up."""
        bucket = self.buckets[self.sent]
        self.sent += 1
        label = f"gradients, bucket {self.sent} of {len(self.buckets)}"
        slots = list(bucket.parameters)
        return bucket, self._wires.reduction(label, self._scale, slots, natively=self._natively)

    @abc.abstractmethod
    def _send(self, bucket: Bucket, reduction: Reduction) -> None:
        """Have the ranks sum up `bucket`."""


class HostBuckets(Buckets):
    """Buckets in host memory, all of it allocated when the backward begins.

    Args:
        thread: carries them.
        packer: makes the packs that they are parts of.
        parameters: by slot.
        slots: of the parameters that are expected to get dense gradients, the same on all ranks.
        nbytes: of a bucket, at most; 0 is `DEFAULT_BYTES`.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        packer: packing.Packer,
        wires: Wires,
        parameters: Sequence[Any],
        slots: Sequence[int],
        scale: float | None,
        nbytes: int,
    ) -> None:
        self._thread = thread
        self._frame = outside(sys._getframe())
        self._done: list[Future[None]] = []
        order = slots[::-1]
        starts = {}
        for pack in packer.packs(parameters, order, thread.communicator, asks=False):
            start = 0
            for slot in pack.indices:
                starts[slot] = pack.flat, start
                start += parameters[slot].numel()
        buckets = []
        for part in cut(order, parameters, nbytes or DEFAULT_BYTES):
            bucket = Bucket({slot: parameters[slot] for slot in part})
            flat, start = starts[part[0]]
            bucket.lies_in(flat[start : start + sum(parameters[slot].numel() for slot in part)])
            buckets.append(bucket)
        super().__init__(buckets, wires, scale)

    def wait(self) -> dict[int, torch.Tensor]:
        for done in self._done:
            done.result()
        return {slot: piece for bucket in self.buckets for slot, piece in bucket.pieces.items()}

    def leave(self) -> None:
        """The thread keeps the memory until it has done its work."""

    def _room(self, bucket: Bucket, slot: int) -> torch.Tensor:
        return bucket.pieces[slot]

    def _send(self, bucket: Bucket, reduction: Reduction) -> None:
        work = functools.partial(self._thread.communicator.all_reduce, bucket.flat, reduction)
        self._done.append(self._thread.submit(work, self._frame))
