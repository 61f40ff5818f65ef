"""Buckets (buffers of gradients) on an accelerator. It sums them up while it computes further gradients.

Three kinds of streams take part. The program's stream runs the backward, and the optimizer step after it. The autograd
engine runs parts of the backward on the streams of their forwards. A side stream sums up buckets. The streams wait for
each other by events. Where a communicator's collectives are ordered by streams (as NCCL's), the host waits for none.
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

# Buckets are few because the ranks' hosts meet at each bucket. They are at most 25 MiB because a bucket may be copied
# to float32.
_PARTS = 16
_SMALLEST = 1 << 20
_LARGEST = 25 << 20


def bucket_bytes(like: Iterable[torch.Tensor]) -> int:
    """Return the most bytes of a bucket if `bytes_per_pack` is not set: a sixteenth of the bytes of all `like`.

    The result is at least 1 MiB and at most 25 MiB.
    Args: like: the parameters with gradients.
    """
    total = sum(parameter.nbytes for parameter in like)
    return min(max(total // _PARTS, _SMALLEST), _LARGEST)


def let_go(gradients: Iterable[torch.Tensor | None]) -> None:
    """Tell the allocator that the current stream reads `gradients`, so that it reuses their memory only afterwards.

    The engine may have allocated the gradients on another stream. None and sparse gradients are skipped. The caller
    frees the gradients after this call.
    """
    for gradient in gradients:
        if gradient is not None and not gradient.is_sparse:
            module = torch.get_device_module(gradient.device)
            gradient.record_stream(module.current_stream(gradient.device))


class SideStream:
    """A second stream of an accelerator, beside the program's. Buckets are summed up on it.

    Args:
        device: the device of all gradients.
        communicator: the communicator that sums up the buckets. Without `thread`, its collectives are ordered by
            streams, so that the host need not wait.
        thread: the thread that makes the collectives and waits for the device; None if the thread that fills a bucket
            makes them.
    """

    def __init__(
        self,
        device: torch.device,
        communicator: Communicator,
        thread: CommunicationThread | None = None,
    ) -> None:
        self.device = device
        self.thread = thread
        self.communicator = communicator
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction, ready: Any) -> None:
        """Sum up a bucket over the ranks in place, on the side stream, after an event. Collective.

        If the communicator takes no device buffers, the bucket is summed up in a copy in host memory and copied back.
        Args:
            flat: the bucket, of shape [elements].
            ready: an event of the stream that has filled the bucket.
        """
        self.stream.wait_event(ready)
        with self.module.stream(self.stream):
            if self.communicator.takes_device_buffers:
                self.communicator.all_reduce(flat, reduction)
                return
            host = arrays.to_host(flat)
            self.communicator.all_reduce(host, reduction)
            flat.copy_(host)


class DeviceBuckets(Buckets):
    """Buckets in device memory. A bucket's memory is allocated when its gradients are there. These are then freed.

    Args:
        side: the stream that sums up buckets.
        nbytes: the most bytes of a bucket; 0 for the result of `bucket_bytes`.
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
        """Have the program's stream wait for all sums, and return them by slot, as views of the buckets' memory.

        Without a communication thread the host does not wait: the sums may not be computed yet on return.
        """
        sums = super().wait()
        self._program.wait_stream(self._side.stream)
        return sums

    def leave(self) -> None:
        for bucket in self._buckets:
            if bucket.flat is not None:
                for stream in (*bucket.writers, self._side.stream):
                    bucket.flat.record_stream(stream)
            bucket.flat = None  # the error's traceback may keep this object
            bucket.pieces = []

    def _lay(self, bucket: Bucket, gradients: list[Any]) -> None:
        """Set the memory of `bucket`: new memory, or the memory of its gradient if it has only one.

        The current stream first waits for the streams that computed the gradients, and for the program's stream.
        """
        here = self.stream()
        bucket.writers.add(here)
        # The program's stream may still use the earlier contents of the memory.
        for stream in {*bucket.writers, self._program} - {here}:
            here.wait_stream(stream)
        let_go(gradients)
        first = gradients[0]
        like = bucket.like[0]
        is_single = len(gradients) == 1 and first is not None
        if is_single and here == self._program and id(bucket.parameters[0]) not in self.shown:
            bucket.flat = packing.flat_view(first, like)
            bucket.pieces = gradients
        if bucket.flat is None:
            with self._side.module.stream(self._program):
                flat = torch.empty(bucket.length, dtype=like.dtype, device=self._side.device)
            bucket.flat = flat
            bucket.pieces = packing.pieces_of(flat, bucket.like)
