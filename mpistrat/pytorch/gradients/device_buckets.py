"""Buckets on an accelerator, which sums them up while it computes further gradients.

Three streams take part. The program's holds the backward, and the optimizer's step after it; the autograd engine may
run parts of the backward on others, on which forwards ran. A side stream holds the sums. Each waits for the others by
events; where collectives are ordered by streams, the host waits for none of them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.communicators import Communicator, Reduction
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.cross_device_ops import packing
from mpistrat.liveness.call_site import Place, outside, standing_for
from mpistrat.pytorch.gradients.buckets import Bucket, Buckets, cut
from mpistrat.pytorch.gradients.wires import Wires

# The ranks' hosts meet at each bucket, and its copy as float32 is not to count: not too many, and not too large.
_PARTS = 16
_SMALLEST, _LARGEST = 1 << 20, 25 << 20


def bucket_bytes(like: Sequence[Any], slots: Sequence[int], asked: int) -> int:
    """So many bytes a bucket of the gradients of `slots` has at most. Args: asked: by the program; 0: nothing."""
    total = sum(like[slot].numel() * like[slot].element_size() for slot in slots)
    return asked or min(max(total // _PARTS, _SMALLEST), _LARGEST)


def let_go(gradient: torch.Tensor | None) -> None:
    """The current stream was the last to read `gradient`, which the backward may have allocated on another."""
    if gradient is not None and not gradient.is_sparse:
        module = torch.get_device_module(gradient.device)
        gradient.record_stream(module.current_stream(gradient.device))


class SideStream:
    """A stream of an accelerator on which buckets are summed up, and who makes the calls.

    Args:
        device: of all gradients.
        communicator: whose collectives are ordered by streams: the calls are made by whoever has filled a bucket.
            Otherwise the communicator of `thread`, which makes them and waits for the device.
    """

    def __init__(
        self,
        device: torch.device,
        communicator: Communicator,
        thread: CommunicationThread | None = None,
    ) -> None:
        self.device, self.thread, self.communicator = device, thread, communicator
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def after(self, ready: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context in which this stream is the current one. What it gets comes after the events `ready`."""
        for event in ready:
            self.stream.wait_event(event)
        return self.module.stream(self.stream)

    def all_reduce(self, flat: torch.Tensor, ready: Sequence[Any], reduction: Reduction) -> None:
        """Sum up `flat` after the events `ready`. Collective, on the thread."""
        with self.after(ready):
            if self.communicator.takes_device_buffers:
                self.communicator.all_reduce(flat, reduction)
                return
            host = arrays.to_host(flat)
            self.communicator.all_reduce(host, reduction)
            flat.copy_(host)


class DeviceBuckets(Buckets):
    """The memory of a bucket is allocated, on the program's stream, when its first gradient comes, whose own then goes.

    Args:
        side: sums them up.
        parameters: by slot; None of those that the program has dropped on this rank.
        like: by slot, the parameters on "meta".
        slots: of the parameters that are expected to get dense gradients, the same on all ranks.
        nbytes: of a bucket, at most; 0: as of `bucket_bytes`.
    """

    def __init__(
        self,
        side: SideStream,
        wires: Wires,
        parameters: Sequence[torch.Tensor | None],
        like: Sequence[Any],
        slots: Sequence[int],
        scale: float | None,
        nbytes: int,
    ) -> None:
        present = [meta if own is None else own for own, meta in zip(parameters, like, strict=True)]
        parts = cut(slots[::-1], like, bucket_bytes(like, slots, nbytes))
        buckets = [Bucket({slot: present[slot] for slot in part}) for part in parts]
        super().__init__(buckets, wires, scale, natively=side.thread is None)
        self._side = side
        frame = outside(sys._getframe())
        self._place = Place(frame.f_code, frame.f_lineno)
        self._program = side.module.current_stream(side.device)
        self._done: list[Future[None]] = []

    def wait(self) -> dict[int, torch.Tensor]:
        """As of `Buckets`; it is the program's stream that waits for the sums."""
        for done in self._done:
            done.result()
        self._program.wait_stream(self._side.stream)
        return {slot: piece for bucket in self.buckets for slot, piece in bucket.pieces.items()}

    def leave(self) -> None:
        for bucket in self.buckets:
            if bucket.flat is not None:
                for stream in (*bucket.writers, self._side.stream):
                    bucket.flat.record_stream(stream)

    def _adopt(self, bucket: Bucket, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        here = self._side.module.current_stream(self._side.device)
        let_go(gradient)
        if len(bucket.parameters) > 1 or here != self._program:
            return False
        flat = packing.flat_view(gradient, parameter)
        if flat is None:
            return False
        bucket.lies_in(flat)
        bucket.writers.append(here)
        return True

    def _room(self, bucket: Bucket, slot: int) -> torch.Tensor:
        if bucket.flat is None:
            some = bucket.parameters[slot]
            length = sum(parameter.numel() for parameter in bucket.parameters.values())
            with self._side.module.stream(self._program):
                flat = torch.empty(length, dtype=some.dtype, device=self._side.device)
            bucket.lies_in(flat)
        here = self._side.module.current_stream(self._side.device)
        if here not in bucket.writers:
            if here != self._program:  # which may still use what the memory held before
                here.wait_stream(self._program)
            bucket.writers.append(here)
        return bucket.pieces[slot]

    def _send(self, bucket: Bucket, reduction: Reduction) -> None:
        ready = [stream.record_event() for stream in bucket.writers]
        side = self._side
        if side.thread is None:
            self.calls += 1
            with standing_for(self._place), side.after(ready):
                side.communicator.all_reduce(bucket.flat, reduction)
        else:
            work = functools.partial(side.all_reduce, bucket.flat, ready, reduction)
            self._done.append(side.thread.submit(work, self._place))
