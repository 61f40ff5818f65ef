"""Dense gradients that leave while `backward()` still runs.

They are packed into flat buffers in reverse order of the parameters, which is about the order in which backward makes
them, and cut into buckets. A bucket leaves, on a thread of its own, once the gradients of all of its parameters are
there and those before it have left; so all ranks send the same buckets in the same order, whatever each of them uses.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
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
    """The buckets of one backward.

    Args:
        thread: carries them.
        packer: makes the packs that are cut into buckets.
        wires: how buckets cross a network.
        parameters: by slot.
        slots: of the parameters that are expected to get dense gradients, the same on all ranks.
        scale: multiplied to the sums, or None.
        nbytes: of a bucket, at least; 0 is `DEFAULT_BYTES`.
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
        self._frame = outside(sys._getframe())
        self._places: dict[int, tuple[_Bucket, int]] = {}  # by the id of a parameter; and its slot
        self._pieces: dict[int, torch.Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._sent: list[Future[None]] = []
        self._shown: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for pack in packer.packs(parameters, slots[::-1], thread.communicator, asks=False):
            self._buckets += _cut(pack, parameters, nbytes or DEFAULT_BYTES)
            self._pieces.update(zip(pack.indices, pack.pieces, strict=True))
        for bucket in self._buckets:
            for slot, parameter in bucket.parameters.items():
                self._places[id(parameter)] = bucket, slot

    def arrived(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter has been accumulated: it is taken if a bucket has room for it.

        What is accumulated after that (reentrant checkpointing of shared parameters) stays in `.grad`.
        """
        bucket, slot = self._places.get(id(parameter), (None, -1))
        if bucket is None or slot not in bucket.missing or parameter.grad is None:
            return
        self._take(bucket, slot, parameter, parameter.grad)
        while len(self._sent) < len(self._buckets) and not self._buckets[len(self._sent)].missing:
            self._send_next()

    def finish(self) -> frozenset[int]:
        """Send the rest, with zeros for what has not come. Returns the slots that got something on this rank.

        Raises: RuntimeError when a gradient has changed that a hook of the program was to see.
        """
        absent: set[int] = set()
        for bucket in self._buckets[len(self._sent) :]:
            for slot in list(bucket.missing):
                parameter = bucket.parameters[slot]
                if parameter.grad is None:  # backwards in no_sync() may have left a gradient
                    self._pieces[slot].zero_()
                    absent.add(slot)
                else:
                    self._take(bucket, slot, parameter, parameter.grad)
            self._send_next()
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

    def _take(
        self, bucket: _Bucket, slot: int, parameter: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        self._pieces[slot].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if len(parameter._post_accumulate_grad_hooks) > 1:
            # The program has a hook, too, which will look at the gradient.
            self._shown.append((parameter, gradient, gradient._version))
        else:
            parameter.grad = None  # its memory serves the gradients that come next
        bucket.missing.discard(slot)

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sent)]
        label = f"gradients, bucket {len(self._sent) + 1} of {len(self._buckets)}{self._wires}"
        wire = self._wires.of(list(bucket.parameters))
        reduction = reducing("sum", label, self._scale).compressed_by(wire)
        work = functools.partial(self._thread.communicator.all_reduce, bucket.flat, reduction)
        self._sent.append(self._thread.submit(work, self._frame))


class _Bucket:
    """A part of a flat buffer, and by slot the parameters whose gradients it has room for."""

    def __init__(self, flat: torch.Tensor, parameters: dict[int, torch.Tensor]) -> None:
        self.flat, self.parameters = flat, parameters
        self.missing = set(parameters)


def _cut(pack: Pack, like: Sequence[Any], nbytes: int) -> Iterator[_Bucket]:
    """A bucket is closed once it has `nbytes`."""
    first = start = end = 0
    for i, slot in enumerate(pack.indices, start=1):
        end += like[slot].numel()
        if i == len(pack.indices) or (end - start) * like[slot].element_size() >= nbytes:
            parameters = {slot: like[slot] for slot in pack.indices[first:i]}
            yield _Bucket(pack.flat[start:end], parameters)
            first, start = i, end
