"""Ranks of several nodes: large buffers are combined within each node, then slice by slice between the nodes.

Every rank of a node carries its slice, so that no one of them is the bottleneck, and each byte of a node crosses the
network as often as if the node were one rank.
"""

from __future__ import annotations

import collections

import numpy as np

from mpistrat.arrays import Array, copy
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.communicator import Communicator, Wire
from mpistrat.communicators.cost_model import slowest
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node_memory import share_of
from mpistrat.communicators.selection import Costs, Way, costs_of, from_bytes
from mpistrat.communicators.shared_window import MEMORY, MPI, SharedWindowCommunicator
from mpistrat.communicators.wrapping import WrappingCommunicator

# Below, what is saved on the network is less than what the meetings within a node cost.
SMALLEST = 1 << 16
BY_NODE, BETWEEN = "by node", "slices between nodes"  # the former is memory, followed by the latter


class HierarchicalCommunicator(WrappingCommunicator):
    """Wraps the communicator of all ranks, which moves what is small, or not numbers.

    Args:
        inner: over all ranks.
        node: over this node's.
        across: over the ranks that stand where this one stands on their nodes; None where some node has none.
        carriers: the ranks of the smallest node: as many of each carry a slice.

    Attributes:
        costs: of its ways; known once the nodes have memory, at the first large buffer.
        smallest: bytes from which on a buffer goes by node, by these costs.
    """

    has_window = True

    def __init__(
        self,
        inner: Communicator,
        node: SharedWindowCommunicator,
        across: Communicator | None,
        carriers: int,
    ) -> None:
        super().__init__(inner)
        self.node, self.across, self.carriers = node, across, carriers
        self._shared: bool | None = None
        self.costs = Costs()
        self.smallest = float(SMALLEST)
        # By rank: the rank that is the first of its node, and its place there.
        first = node.all_gather_object(self.rank)[0]
        self._places: list[tuple[int, int]] = inner.all_gather_object((first, node.rank))

    def _goes_by_node(self, buffer: Array, op: str) -> bool:
        if buffer.nbytes < SMALLEST or arithmetic_of(buffer, op) is None:
            return False
        return self._by_node(int(buffer.nbytes))

    def _by_node(self, nbytes: int) -> bool:
        """Collective."""
        if self._shared is None:
            everywhere = np.array(self.node.is_shared(), np.int32)
            self.inner.all_reduce(everywhere, "min")
            self._shared = bool(everywhere)
            if self._shared:
                self._measure()
        return self._shared and nbytes >= self.smallest

    def _measure(self) -> None:
        """From which size on going by node is faster than MPI over all ranks."""

        def between(buffer: np.ndarray) -> None:
            if self.across is not None:
                self.across.all_reduce(buffer[: len(buffer) // self.carriers])

        ways: dict[str, Way] = {BETWEEN: between, MPI: self.inner.all_reduce}
        ranks_of_nodes = list(collections.Counter(first for first, _ in self._places).values())
        costs = costs_of(ways, self.inner, self.node.inner.library, ranks_of_nodes)
        nodes: list[Costs] = self.inner.all_gather_object(self.node.costs)
        known = {}
        if costs.ways and all(node.ways for node in nodes):
            memory = slowest(node.ways[MEMORY] for node in nodes)
            by_node = memory.followed_by(costs.ways[BETWEEN])
            known = {BY_NODE: by_node, MEMORY: memory, **costs.ways}
        disturbed = costs.disturbed or any(node.disturbed for node in nodes)
        self.costs = costs = Costs(known, costs.origin, disturbed)
        self.smallest = costs.cheaper_from(BY_NODE, MPI, SMALLEST)

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        if nbytes < SMALLEST or not self._by_node(nbytes):
            return None
        memory = self.node.window_buffer(nbytes)
        if nbytes > self.window_capacity:
            everywhere = np.array(self.node.window_capacity, np.int64)
            self.inner.all_reduce(everywhere, "min")
            self.window_capacity = int(everywhere)
        return memory

    def all_reduce(
        self,
        buffer: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        label: str = "",
        error: Exception | None = None,
        scale: float | None = None,
        wire: Wire | None = None,
    ) -> None:
        if not self._goes_by_node(buffer, op):
            small = buffer.nbytes < SMALLEST
            self.inner.all_reduce(buffer, op, out=out, scale=scale, wire=None if small else wire)
            return

        def across(slice_: Array) -> None:
            assert self.across is not None
            self.across.all_reduce(slice_, op, wire=wire)

        self.node.all_reduce_across(buffer, op, out, scale, self.carriers, across)

    def reduce(self, buffer: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        if not self._goes_by_node(buffer, op):
            self.inner.reduce(buffer, root, op)
            return
        total = copy(buffer)
        self.all_reduce(total, op)
        if self.rank == root:
            buffer[...] = total

    def reduce_scatter(
        self, buffer: Array, out: Array, op: str = "sum", *, label: str = ""
    ) -> None:
        self.inner.reduce_scatter(buffer, out, op)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        """Within the root's node, from each of its carriers to those of the other nodes, and within these."""
        memory = bytes_of(buffer)
        if not self._goes_by_node(memory, "max"):
            self.inner.broadcast(buffer, root)
            return
        node, place = self._places[root]
        here = self._places[self.rank][0] == node
        if here:
            self.node.broadcast(memory, place)
        bounds = share_of(len(memory), 1, self.node.size, self.carriers)
        if self.across is not None:
            first, end = bounds[self.node.rank]
            self.across.broadcast(memory[first:end], self._across_rank(node))
        if not here:
            self.node.gather_slices(memory, bounds)

    def _across_rank(self, node: int) -> int:
        """That of the rank of `node` which stands where this one stands on its own."""
        peers = [first for first, place in self._places if place == self.node.rank]
        return peers.index(node)

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        return self.inner.all_gather(buffer)

    def explain(self) -> str:
        nodes = len({first for first, _ in self._places})
        told = f"{self.size} ranks on {nodes} nodes: by node, in {self.carriers} slices between the nodes, "
        if self._shared is None:
            told += "once something large has been combined"
        elif not self._shared:
            told += "never, for a node has no shared memory"
        else:
            told += f"{from_bytes(self.smallest)}; of S bytes an all-reduce takes\n{self.costs.explain()}"
        return f"{told}\n{self.node.explain()}"
