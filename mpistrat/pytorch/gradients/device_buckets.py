"""Buckets on an accelerator, which sums them up while it computes further gradients.

Three streams take part. The program's holds the backward, and the optimizer's step after it; the autograd engine may
run parts of the backward on others, on which forwards ran. A side stream holds the sums. Each waits for the others by
events; where collectives are ordered by streams, the host waits for none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.communicators import Communicator, Reduction
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.cross_device_ops import packing
from mpistrat.pytorch.gradients.buckets import Bucket, Buckets
from mpistrat.pytorch.gradients.wires import Wires

# The ranks' hosts meet at each bucket, and its copy as float32 is not to count: not too many, and not too large.
_PARTS = 16
_SMALLEST, _LARGEST = 1 << 20, 25 << 20


def bucket_bytes(like: Iterable[torch.Tensor]) -> int:
    """So many bytes a bucket of the gradients of the parameters `like` has at most, where the program asks for none."""
    total = sum(parameter.nbytes for parameter in like)
    return min(max(total // _PARTS, _SMALLEST), _LARGEST)


def let_go(gradients: Iterable[torch.Tensor | None]) -> None:
    """The current stream was the last to read `gradients`, which the backward may have allocated on another."""
    for gradient in gradients:
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

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction, ready: Any) -> None:
        """Sum up `flat` after the event `ready`. Collective."""
        self.stream.wait_event(ready)
        with self.module.stream(self.stream):
            if self.communicator.takes_device_buffers:
                self.communicator.all_reduce(flat, reduction)
                return
            host = arrays.to_host(flat)
            self.communicator.all_reduce(host, reduction)
            flat.copy_(host)


class DeviceBuckets(Buckets):
    """The memory of a bucket is allocated, on the program's stream, when its gradients have come, which then go.

    Args:
        side: sums them up.
        nbytes: 0: as of `bucket_bytes`.
    """

    stream: Callable[[], Any]

    def __init__(
        self,
        side: SideStream,
        wires: Wires,
        like: Mapping[int, torch.Tensor],
        scale: float | None,
        nbytes: int,
    ) -> None:
        nbytes = nbytes or bucket_bytes(like.values())
        super().__init__(wires, like, scale, nbytes, side.all_reduce, side.thread)
        self._side = side
        self.stream = functools.partial(side.module.current_stream, side.device)

    def wait(self) -> dict[int, torch.Tensor]:
        """As of `Buckets`; it is the program's stream that waits for the sums."""
        sums = super().wait()
        self._program.wait_stream(self._side.stream)
        return sums

    def leave(self) -> None:
        for bucket in self._buckets:
            if bucket.flat is not None:
                for stream in (*bucket.writers, self._side.stream):
                    bucket.flat.record_stream(stream)
            bucket.flat, bucket.pieces = None, []  # whoever keeps the error keeps this object

    def _lay(self, bucket: Bucket, gradients: list[Any]) -> None:
        """Allocate memory for `bucket`, or take that of its only gradient. What was written elsewhere comes first."""
        here = self.stream()
        bucket.writers.add(here)
        # The program's may still use what the memory held before.
        for stream in {*bucket.writers, self._program} - {here}:
            here.wait_stream(stream)
        let_go(gradients)
        first, like = gradients[0], bucket.like[0]
        is_single = len(gradients) == 1 and here == self._program and first is not None
        if is_single and id(bucket.parameters[0]) not in self.shown:
            bucket.flat, bucket.pieces = packing.flat_view(first, like), gradients
        if bucket.flat is None:
            with self._side.module.stream(self._program):
                flat = torch.empty(bucket.length, dtype=like.dtype, device=self._side.device)
            bucket.flat, bucket.pieces = flat, packing.pieces_of(flat, bucket.like)
