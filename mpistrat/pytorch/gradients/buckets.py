"""Dense gradients that leave while `backward()` still runs.

They are packed into flat buffers in reverse order of the parameters, which is about the order in which backward makes
them, and cut into buckets. A bucket leaves, on a thread of its own, once the gradients of all of its parameters are
there and those before it have left; so all ranks send the same buckets in the same order, whatever each of them uses.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

import torch

from mpistrat.communicators import reducing
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.cross_device_ops.packing import Pack, Packer
from mpistrat.liveness.call_site import outside
from mpistrat.pytorch.gradients.wires import Wires

# Of float32 over 1 Gbit/s 32 ms: long beside what a message costs, short beside a backward that takes longer.
DEFAULT_BYTES = 1 << 22


class Buckets:
    """Those of one backward.

    Args:
        thread: carries them.
        packer: whose memory they use.
        wires: how they cross a network.
        parameters: by slot.
        slots: which of them are expected to get dense gradients, the same on all ranks.
        scale: multiplied to the sums, or None.
        nbytes: of a bucket, at least, or 0.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        packer: Packer,
        wires: Wires,
        parameters: Sequence[torch.Tensor | None],
        slots: Sequence[int],
        scale: float | None,
        nbytes: int,
    ) -> None:
        self._thread, self._scale, self._wires = thread, scale, wires
        self._frame: FrameType = outside(sys._getframe())
        self._bucket_of: dict[int, _Bucket] = {}  # by the id of a parameter
        self._slots: dict[int, int] = {}
        self._pieces: dict[int, torch.Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._sent: list[Future[None]] = []
        self._shown: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for pack in packer.packs(parameters, slots[::-1], thread.communicator, asks=False):
            for bucket in _cut(pack, parameters, nbytes or DEFAULT_BYTES):
                self._buckets.append(bucket)
                for slot, parameter in zip(bucket.slots, bucket.parameters, strict=True):
                    self._bucket_of[id(parameter)] = bucket
                    self._slots[id(parameter)] = slot
            self._pieces.update(zip(pack.indices, pack.pieces, strict=True))

    def arrived(self, parameter: torch.Tensor) -> None:
        """Called when the gradient of any parameter has been accumulated; it is taken if there is a place for it.

        What is accumulated later still (reentrant checkpointing of shared parameters) stays in `.grad`.
        """
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or not bucket.missing:
            return
        slot = self._slots[id(parameter)]
        if slot in bucket.missing:
            self._take(bucket, slot, parameter)
            while len(self._sent) < len(self._buckets):
                following = self._buckets[len(self._sent)]
                if following.missing:
                    break
                self._send(following)

    def finish(self) -> frozenset[int]:
        """Send the rest, with zeros for what has not come. Returns the slots that got something on this rank.

        Raises: RuntimeError when a gradient has changed that a hook of the program was to see.
        """
        absent: set[int] = set()
        for bucket in self._buckets[len(self._sent) :]:
            for slot, parameter in zip(bucket.slots, bucket.parameters, strict=True):
                if slot in bucket.missing:
                    if parameter.grad is None:  # of backwards in no_sync() it may have one
                        self._pieces[slot].zero_()
                        absent.add(slot)
                    else:
                        self._take(bucket, slot, parameter)
            bucket.missing.clear()
            self._send(bucket)
        for parameter, gradient, version in self._shown:
            if parameter.grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} changed after it was sent: it has a "
                    "post-accumulate hook, for which it was kept, and grew once more or was written to. Use "
                    "CommunicationOptions(overlap=False)"
                )
            parameter.grad = None
        return frozenset(self._pieces) - absent

    def wait(self) -> dict[int, torch.Tensor]:
        """The sums by slot, once all buckets are back. Raises: what a collective has raised on the thread."""
        for sent in self._sent:
            sent.result()
        return self._pieces

    def _take(self, bucket: _Bucket, slot: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self._pieces[slot].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if len(parameter._post_accumulate_grad_hooks) > 1:
            # The program has one, too, which will look at it.
            self._shown.append((parameter, gradient, gradient._version))
        else:
            parameter.grad = None  # its memory serves the gradients that come next
        bucket.missing.discard(slot)

    def _send(self, bucket: _Bucket) -> None:
        number = len(self._sent)
        label = f"gradients, bucket {number + 1} of {len(self._buckets)}{self._wires}"
        wire = self._wires.of(bucket.slots)
        reduction = reducing("sum", label, self._scale).compressed_by(wire)
        work = functools.partial(self._thread.communicator.all_reduce, bucket.flat, reduction)
        self._sent.append(self._thread.submit(work, self._frame))


class _Bucket:
    """A part of a flat buffer, and the parameters whose gradients it has room for."""

    def __init__(
        self, flat: torch.Tensor, slots: list[int], parameters: list[torch.Tensor]
    ) -> None:
        self.flat, self.slots, self.parameters = flat, slots, parameters
        self.missing = set(slots)


def _cut(pack: Pack, like: Sequence[Any], nbytes: int) -> list[_Bucket]:
    """A bucket is closed once it has `nbytes`."""
    buckets = []
    first = start = end = 0
    parameters = [like[slot] for slot in pack.indices]
    for i, parameter in enumerate(parameters):
        end += parameter.numel()
        last = i + 1 == len(parameters)
        if last or (end - start) * parameter.element_size() >= nbytes:
            buckets.append(
                _Bucket(
                    pack.flat[start:end], pack.indices[first : i + 1], parameters[first : i + 1]
                )
            )
            first, start = i + 1, end
    return buckets
