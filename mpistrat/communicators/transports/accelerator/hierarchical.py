"""Large buffers on GPUs of several nodes: combined within each node, then slice by slice between the nodes.

Within a node, the GPUs' own library (NCCL) uses the links between the GPUs. Between nodes, each rank sends its slice
(with n ranks on a node, an n-th of the buffer) by MPI: from its GPU's memory if MPI takes that, else through pinned
host memory. Each byte crosses the network only as often as if the node were one rank.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

from mpistrat.arrays import Array, num_elements
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.costs import measurement
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.reduction.arithmetic import scale
from mpistrat.communicators.reduction.as_float32 import combined_as_float32
from mpistrat.communicators.transport import Move, Moves, by_others
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.library import DeviceLibrary
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.options import CommunicationImplementation

# Bytes. For a smaller buffer, the calls of a second library take longer than the shorter way through the network saves.
SMALLEST = 1 << 16
_FIRST = 1 << 20  # bytes of a first call, enough to start all transports that are used below
BY_NODE = "by node"
ALL_ALIKE = "all ranks alike"


class HierarchicalDeviceTransport(DeviceTransport):
    """Moves large buffers on GPUs of several nodes that have equally many ranks: within the nodes, then between them.

    The host waits between the phases, so that NCCL and an MPI that takes device memory never run together. Together
    they could deadlock. `all_reduce`, `reduce` and `broadcast` go this way; all other calls go by `flat`.

    Args:
        nodes: the number of each rank's node, in rank order.
        within: the transport over the ranks of this node, in rank order.
        between: the transport over one rank of each node: the ranks with this rank's number on their nodes.
        flat: the transport over all ranks, for the calls and the smaller buffers that do not go by node.

    Attributes:
        costs: the measured times of all-reduces by node and by `flat`; NOT_MEASURED before `measure`.
        smallest: buffers of at least so many bytes go by node; 64 KiB before `measure`; infinite if `flat` is faster at
            any size.
    """

    def __init__(
        self,
        host: Communicator,
        index: int,
        watch: CommunicatorWatch,
        nodes: Sequence[int],
        within: DeviceTransport,
        between: DeviceTransport,
        flat: DeviceTransport,
    ) -> None:
        super().__init__(host, index, watch)
        self.within = within
        self.between = between
        self.flat = flat
        self.costs = measurement.NOT_MEASURED
        self.smallest = float(SMALLEST)
        self._nodes = nodes
        # For each rank, its number among the ranks of its node
        self._places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
        # A program that asks for HIERARCHICAL gets the copy. Its `smallest` stays SMALLEST.
        ways = CommunicationImplementation
        self.forced = {ways.NCCL: flat, ways.HIERARCHICAL: copy.copy(self)}

    @property
    def ordered_by_streams(self) -> bool:  # type: ignore[override]
        """Whether all collectives return when they are queued in a stream; False if some buffers go by node.

        For a buffer that goes by node, the host waits between the phases.
        """
        return self.flat.ordered_by_streams and math.isinf(self.smallest)

    moves: ClassVar[Moves] = {
        AllReduce: DeviceTransport.all_reduce,
        Reduce: by_others,
        Broadcast: DeviceTransport.broadcast,
    }

    def choose(self, collective: Collective) -> Move | None:
        return super().choose(collective) or self.flat.choose(collective)

    def takes(self, collective: Collective) -> bool:
        """Whether a buffer is large enough to go by node. A compressor needs all values on the host."""
        return collective.buffer.nbytes >= self.smallest and collective.compressor is None

    def measure(self, library: DeviceLibrary, mpi: str) -> None:
        """Measure from which size on going by node is faster, and set `smallest`, `costs` and `why`. Collective.

        Called by: `gpu_transports`, once, after the transport was made.
        Args:
            library: the library of the measured buffers.
            mpi: the name and version of the MPI library. Times of another library are not used.
        """

        def zeros(length: int) -> Array:
            with library.device():
                buffer = library.empty((length,), "float32")
                buffer[...] = 0
                return buffer

        def waiting(all_reduce: Move) -> Callable[[Array], None]:
            def way(buffer: Array) -> None:
                all_reduce(AllReduce(buffer))
                self.within.wait_for_current_stream(buffer)

            return way

        # Before the measurement: the transports connect, and measure the transports that they use.
        for all_reduce in (self.all_reduce, self.flat.all_reduce):
            waiting(all_reduce)(zeros(_FIRST // 4))
        between = type(self.between).__name__
        flat = type(self.flat).__name__
        name = f"{library.name}, {self.within.why}, {between}, {flat}"
        self.costs = measurement.costs_of(
            {BY_NODE: waiting(self.all_reduce), ALL_ALIKE: waiting(self.flat.all_reduce)},
            self.host,
            mpi,
            list(collections.Counter(self._nodes).values()),
            asleep=[BY_NODE, ALL_ALIKE],
            memory=measurement.BufferMemory(name, measurement.SIZES_ON_DEVICE, zeros),
        )
        self.smallest = self.costs.cheaper_from(BY_NODE, ALL_ALIKE, SMALLEST)
        slices = f"in {self.within.size} slices between the nodes, {self.between.why}"
        sizes = self.costs.explain_from(self.smallest)
        self.why = f"{self.flat.why}; large ones by node, {slices}, {sizes}"

    def wait_until_idle(self) -> None:
        self.flat.wait_until_idle()
        self.within.wait_until_idle()

    def _combine(self, buffer: Array, reduction: Reduction) -> None:
        if combined_as_float32(buffer, reduction, self._combine):  # rounds once, not on each node
            return
        plain = reduction.plain
        flat, whole, own_slice = self._sliced(buffer)
        self.within.move(ReduceScatter(whole, plain, own_slice))
        self.wait_until_idle()  # because MPI uses the GPU next
        self.between.all_reduce(AllReduce(own_slice, plain))
        self.within.move(AllGatherInto(own_slice, whole))
        if whole is not flat:
            flat[...] = whole[: num_elements(flat)]
        scale(buffer, reduction.scale)

    def _spread(self, buffer: Array, root: int) -> None:
        """Broadcast `buffer` from rank `root`: within its node, then between the nodes, then within the other nodes.

        Each rank of the root's node sends one slice to the other nodes. There, the node's ranks all-gather the slices.
        Args: root: a rank of this transport (0 to `size` - 1, over all nodes).
        """
        flat, whole, own_slice = self._sliced(buffer)
        node = self._nodes[root]
        place = self._places[self.rank]
        if self._nodes[self.rank] == node:
            self.within.broadcast(Broadcast(whole, self._places[root]))
        ranks = [rank for rank in range(self.size) if self._places[rank] == place]
        peers = [self._nodes[rank] for rank in ranks]
        self.wait_until_idle()  # because MPI uses the GPU next
        self.between.broadcast(Broadcast(own_slice, peers.index(node)))
        if self._nodes[self.rank] != node:
            self.within.move(AllGatherInto(own_slice, whole))
        if whole is not flat:
            flat[...] = whole[: num_elements(flat)]

    def _sliced(self, buffer: Array) -> tuple[Array, Array, Array]:
        """Split `buffer` into equal slices, one for each rank of the node.

        Returns: three arrays: a flat view of the buffer; the same view, or a copy with zeros at its end if the length
            is no multiple of the node's ranks; a view of this rank's slice of the second array.
        """
        library = self.library(buffer)
        ranks = self.within.size
        whole = flat = library.flat(buffer)
        elements = num_elements(flat)
        length = -(-elements // ranks)
        if length * ranks > elements:
            whole = library.empty((length * ranks,), flat.dtype)
            whole[:elements] = flat
            whole[elements:] = 0
        first = self.within.rank * length
        return flat, whole, whole[first : first + length]


def why_not_by_node(nodes: Sequence[int]) -> str:
    """Return why buffers on GPUs do not go by node; "" on several nodes that all have the same number of ranks, over 1.

    Args: nodes: the number of each rank's node, in rank order.
    """
    ranks = collections.Counter(nodes).values()
    if len(ranks) == 1:
        return "there is one node"
    if set(ranks) == {1}:
        return "each rank is on a node of its own"
    if len(set(ranks)) > 1:
        return f"nodes have {min(ranks)} to {max(ranks)} ranks"
    return ""
