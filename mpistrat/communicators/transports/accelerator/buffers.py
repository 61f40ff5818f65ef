"""The base class of transports for buffers on GPUs. It copies buffers through the host, which works everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from mpistrat.arrays import Array, is_on_gpu, is_torch, to_device_of, to_host
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_reduce_by_tree import AllReduceByTree
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.transport import Moves, Transport, by_others
from mpistrat.communicators.transports.accelerator.library import DeviceLibrary, library_of
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until
from mpistrat.options import CommunicationImplementation


def all_reduce_by_tree(transport: DeviceTransport, collective: AllReduceByTree) -> None:
    """Add up the sums of all ranks on the host. Collective."""
    buffer = collective.buffer
    transport.wait_for_current_stream(buffer)
    sums = to_host(buffer)
    transport.host.all_reduce_by_tree(sums, collective.tree, collective.reduction)
    buffer[0] = to_device_of(sums[0], buffer)


class DeviceTransport(Transport):
    """Moves buffers on GPUs. This class copies a buffer to the host, where `host` combines it, and back.

    A collective returns when the result is in the buffer, or when the work is submitted to the device.

    Args:
        host: the communicator of the ranks that this transport connects, for buffers on the host and objects.
        index: the number of this process's GPU. A buffer on another GPU is copied to this GPU and back.
        watch: this rank's record of the calls that it waits in; the node's observer reads it, and reports stalls.
        why: how buffers travel and why, in words for people; `explain()` shows it.

    Attributes:
        forced: for an implementation that a program may ask for (NCCL, HIERARCHICAL), the transport to use instead of
            this one; empty if there is no other.
    """

    takes_device_buffers = True
    forced: Mapping[CommunicationImplementation, Transport] = {}

    def __init__(
        self, host: Communicator, index: int, watch: CommunicatorWatch, why: str = ""
    ) -> None:
        self.host = host
        self.rank = host.rank
        self.size = host.size
        self._index = index
        self._watch = watch
        self.why = why
        self._libraries: dict[bool, DeviceLibrary] = {}

    # Subclasses replace these three

    def _combine(self, buffer: Array, reduction: Reduction) -> None:
        """All-reduce `buffer`, which is on this rank's GPU, in place."""
        self.combine_on_host(buffer, reduction)

    def _spread(self, buffer: Array, root: int) -> None:
        """Broadcast `buffer`, which is on this rank's GPU, from rank `root`."""
        self.wait_for_current_stream(buffer)
        _change_on_host(buffer, lambda host: self.host.broadcast(host, root))

    def _gather(self, buffer: Array) -> list[Array]:
        """Return the `buffer` of every rank, in rank order, on this rank's GPU."""
        self.wait_for_current_stream(buffer)
        return [to_device_of(part, buffer) for part in self.host.all_gather(to_host(buffer))]

    # The collectives

    def takes(self, collective: Collective) -> bool:
        return is_on_gpu(collective.buffer)

    def all_reduce(self, collective: AllReduce) -> None:
        reduction = collective.reduction
        if collective.out is not None:
            collective.out[...] = collective.buffer
        # A compressor (it shortens floats for the network) works on the host, on the whole buffer.
        combine = self._combine if reduction.compressor is None else self.combine_on_host
        self._on_this_gpu(collective.target, lambda here: combine(here, reduction))

    def broadcast(self, collective: Broadcast) -> None:
        self._on_this_gpu(collective.buffer, lambda here: self._spread(here, collective.root))

    def all_gather(self, collective: AllGather) -> list[Array]:
        library = self.library(collective.buffer)
        here = library.here(collective.buffer)
        with library.device():
            return self._gather(here)

    def all_to_all(self, collective: AllToAll) -> None:
        self.wait_for_current_stream(collective.buffer)
        exchange_on_host(self.host, collective)

    moves: ClassVar[Moves] = {
        AllReduce: all_reduce,
        AllReduceByTree: all_reduce_by_tree,
        Reduce: by_others,
        ReduceScatter: by_others,
        Broadcast: broadcast,
        AllGather: all_gather,
        AllGatherInto: by_others,
        AllToAll: all_to_all,
    }

    def explain(self, rest: str) -> str:
        return f"buffers on GPUs: {self.why}\nbuffers on the host: {rest}"

    # Parts that subclasses use

    def library(self, buffer: Array) -> DeviceLibrary:
        kind = is_torch(buffer)
        if kind not in self._libraries:
            self._libraries[kind] = library_of(buffer, self._index)
        return self._libraries[kind]

    def combine_on_host(self, buffer: Array, reduction: Reduction) -> None:
        self.wait_for_current_stream(buffer)
        _change_on_host(buffer, lambda host: self.host.all_reduce(host, reduction))

    def wait_for_current_stream(self, buffer: Array) -> None:
        """Wait until the GPU has done the work on the current stream, so that `buffer` has its values."""
        library = self.library(buffer)
        self.wait(library, library.record(library.current_stream()))

    def wait(self, library: DeviceLibrary, event: Any) -> None:
        wait_until(lambda: library.is_done(event), self._watch)

    def _on_this_gpu(self, buffer: Array, change: Callable[[Array], None]) -> None:
        library = self.library(buffer)
        here = library.here(buffer)
        with library.device():
            change(here)
        if here is not buffer:
            buffer[...] = to_device_of(to_host(here), buffer)


def _change_on_host(buffer: Array, change: Callable[[Array], None]) -> None:
    host = to_host(buffer)
    change(host)
    buffer[...] = to_device_of(host, buffer)


def exchange_on_host(host: Communicator, collective: AllToAll) -> None:
    """Do an `all_to_all` of buffers on a device by copies to the host and back.
    Args: host: the communicator of the ranks that exchange.
    """
    buffer = to_host(collective.buffer)
    out = to_host(collective.out)
    host.all_to_all(buffer, out, collective.sent, collective.received)
    collective.out[...] = to_device_of(out, collective.out)
