"""Large buffers on GPUs of several nodes: combined within each node, then slice by slice between the nodes.

Within a node, the GPUs' own library (NCCL) uses the links between the GPUs. Between nodes, each rank sends its slice by
MPI: from its GPU's memory if MPI takes that, else through pinned host memory. Each byte crosses the network only as
often as if the node were one rank.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Sequence

from mpistrat.arrays import Array, num_elements
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.costs import measurement
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.reduction.arithmetic import scale
from mpistrat.communicators.transport import Exchange, Operands, combined_as_float32
from mpistrat.communicators.transports.accelerator.buffers import DeviceTransport
from mpistrat.communicators.transports.accelerator.library import DeviceLibrary
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.options import CommunicationImplementation

# Bytes. For a smaller buffer the calls of a second library cost more than the network saves.
SMALLEST = 1 << 16
_FIRST = 1 << 20  # bytes of a first call, enough to start all transports that are used below
BY_NODE, ALL_ALIKE = "by node", "all ranks alike"
_CALLS = frozenset(["all_reduce", "reduce", "broadcast"])


class HierarchicalDeviceTransport(DeviceTransport):
    """Moves large buffers on GPUs of several nodes that have equally many ranks.

    The host waits between the phases, so that NCCL and an MPI that takes device memory never run together. Together
    they could deadlock.

    Args:
        nodes: the number of each rank's node, in rank order.
        within: the transport over the ranks of this node, in rank order.
        between: the transport over the ranks with the same place on their nodes, in rank order.
        flat: the transport over all ranks, for the calls that this transport does not take.

    Attributes:
        costs: the measured costs of both transports.
        smallest: buffers of at least so many bytes go by node; infinite if going by node does not pay.
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
        self.within, self.between, self.flat = within, between, flat
        self.costs = measurement.NOT_MEASURED
        self.smallest = float(SMALLEST)
        self._nodes = nodes
        # For each rank, its place among the ranks of its node.
        self._places = [list(nodes[:rank]).count(node) for rank, node in enumerate(nodes)]
        # The copy for HIERARCHICAL keeps SMALLEST, whatever `measure` finds.
        ways = CommunicationImplementation
        self.forced = {ways.NCCL: flat, ways.HIERARCHICAL: copy.copy(self)}

    @property
    def ordered_by_streams(self) -> bool:  # type: ignore[override]
        """Whether streams order all calls: False if the host has to wait between the phases of some buffers."""
        return self.flat.ordered_by_streams and math.isinf(self.smallest)

    def choose(self, call: str, operands: Operands) -> Exchange | None:
        by_node = operands.buffer.nbytes >= self.smallest and takes(call, operands)
        return self if by_node else self.flat.choose(call, operands)

    def measure(self, library: DeviceLibrary, mpi: str) -> None:
        """Measure from which size on going by node is faster, and set `smallest`, `costs` and `why`. Collective.

        Args:
            library: the library of the buffers.
            mpi: the name and version of the MPI library.
        """

        def zeros(length: int) -> Array:
            with library.device():
                buffer = library.empty((length,), "float32")
                buffer[...] = 0
                return buffer

        def waiting(all_reduce: Callable[[Operands], None]) -> Callable[[Array], None]:
            def way(buffer: Array) -> None:
                all_reduce(Operands(buffer))
                self.within.wait_for_current_stream(buffer)

            return way

        # Before the measurement: the transports connect, and measure the transports that they use.
        for all_reduce in (self.all_reduce, self.flat.all_reduce):
            waiting(all_reduce)(zeros(_FIRST // 4))
        by = self.within.why, type(self.between).__name__, type(self.flat).__name__
        name = f"{library.name}, {', '.join(by)}"
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
        self.within.reduce_scatter(Operands(whole, plain, own_slice))
        self.wait_until_idle()  # because MPI uses the GPU next
        self.between.all_reduce(Operands(own_slice, plain))
        self.within.all_gather_into(Operands(own_slice, out=whole))
        if whole is not flat:
            flat[...] = whole[: num_elements(flat)]
        scale(buffer, reduction.scale)

    def _spread(self, buffer: Array, root: int) -> None:
        """Broadcast `buffer` from rank `root`: on its node, then between the nodes, then on each other node."""
        flat, whole, own_slice = self._sliced(buffer)
        node, place = self._nodes[root], self._places[self.rank]
        if self._nodes[self.rank] == node:
            self.within.broadcast(Operands(whole, root=self._places[root]))
        peers = [self._nodes[rank] for rank in range(self.size) if self._places[rank] == place]
        self.wait_until_idle()  # because MPI uses the GPU next
        self.between.broadcast(Operands(own_slice, root=peers.index(node)))
        if self._nodes[self.rank] != node:
            self.within.all_gather_into(Operands(own_slice, out=whole))
        if whole is not flat:
            flat[...] = whole[: num_elements(flat)]

    def _sliced(self, buffer: Array) -> tuple[Array, Array, Array]:
        """Split `buffer` into equal slices, one for each rank of the node.

        Returns: the flat buffer; the flat buffer again, or a copy that is padded with zeros to a multiple of the node's
            ranks; this rank's slice of the second array.
        """
        library, ranks = self.library(buffer), self.within.size
        whole = flat = library.flat(buffer)
        length = -(-num_elements(flat) // ranks)
        if length * ranks > num_elements(flat):
            whole = library.empty((length * ranks,), flat.dtype)
            whole[: num_elements(flat)] = flat
            whole[num_elements(flat) :] = 0
        return flat, whole, whole[self.within.rank * length : (self.within.rank + 1) * length]


def takes(call: str, operands: Operands) -> bool:
    """Return whether a call on GPUs can go by node.

    Only large buffers do. Sums in the order of a tree, and sums with a compressor, need all values on the host.
    """
    return (
        call in _CALLS
        and operands.buffer.nbytes >= SMALLEST
        and operands.tree is None
        and operands.reduction.compressor is None
    )


def why_not_by_node(nodes: Sequence[int]) -> str:
    """Return why buffers on GPUs do not go by node; "" if they may.

    They may on several nodes with equally many ranks, more than one. Args: nodes: the number of each rank's node.
    """
    ranks = collections.Counter(nodes).values()
    if len(ranks) == 1:
        return "there is one node"
    if set(ranks) == {1}:
        return "each rank is on a node of its own"
    if len(set(ranks)) > 1:
        return f"nodes have {min(ranks)} to {max(ranks)} ranks"
    return ""
