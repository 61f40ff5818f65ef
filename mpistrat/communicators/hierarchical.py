"""Ranks of several nodes: large buffers are combined within each node, then slice by slice between the nodes.

Every rank of a node carries its slice, so that no one of them is the bottleneck, and each byte of a node crosses the
network as often as if the node were one rank.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, copy
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.common_memory import CommonMemory, Part, View
from mpistrat.communicators.communicator import Communicator, Wire
from mpistrat.communicators.cost_model import slowest
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node_memory import share_of
from mpistrat.communicators.patient import PatientCommunicator
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.selection import SECONDS_BETWEEN_NODES, Costs, Way, costs_of, from_bytes
from mpistrat.communicators.shared_window import MEMORY, MPI, SharedWindowCommunicator
from mpistrat.communicators.tree_sum import tree_sum_of
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
        across: PatientCommunicator | None,
        carriers: int,
    ) -> None:
        super().__init__(inner)
        self.node, self.across, self.carriers = node, across, carriers
        self._shared: bool | None = None
        self._parts: dict[ReductionTree, tuple[ReductionTree, ReductionTree]] = {}
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
        if self.across is not None:
            self.across.settle(self.carriers)

        def between(buffer: np.ndarray) -> None:
            if self.across is not None:
                self.across.all_reduce(buffer[: len(buffer) // self.carriers])

        ways: dict[str, Way] = {BETWEEN: between, MPI: self.inner.all_reduce}
        ranks_of_nodes = list(collections.Counter(first for first, _ in self._places).values())
        mpi = self.node.inner.library
        costs = costs_of(
            ways, self.inner, mpi, ranks_of_nodes, asleep=[BETWEEN], seconds=SECONDS_BETWEEN_NODES
        )
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
        how = arithmetic_of(buffer, op)
        if how is None or not self._goes_by_node(buffer, op):
            small = buffer.nbytes < SMALLEST
            self.inner.all_reduce(buffer, op, out=out, scale=scale, wire=None if small else wire)
            return

        def across(slice_: Array) -> Array:
            assert self.across is not None
            self.across.all_reduce(slice_, op, wire=wire)
            return slice_

        self.node.all_reduce_across(buffer, how, out, scale, self.carriers, across)

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, *, label: str = "", scale: float | None = None
    ) -> None:
        """As `all_reduce`. Ranks of a node whose replicas are no neighbours have several sums to carry."""
        if not tree.one_each or not self._goes_by_node(sums, "sum"):
            self.inner.all_reduce_by_tree(sums, tree, scale=scale)
            return
        within, between = self._parts_of(tree)

        def across(slices: Array) -> Array:
            assert self.across is not None
            slices = slices.reshape(len(between.held[self.across.rank]), -1)
            self.across.all_reduce_by_tree(slices, between)
            return slices[0]

        how = tree_sum_of(sums, within)
        self.node.all_reduce_across(sums, how, None, scale, self.carriers, across)

    def _parts_of(self, tree: ReductionTree) -> tuple[ReductionTree, ReductionTree]:
        """What this node's ranks can add up of `tree`, and what `across` can of the rest."""
        if tree not in self._parts:
            nodes: dict[int, list[int]] = {}
            for rank, (first, _) in enumerate(self._places):
                nodes.setdefault(first, []).append(rank)
            within = {first: tree.within(ranks) for first, ranks in nodes.items()}
            peers = [first for first, place in self._places if place == self.node.rank]
            between = ReductionTree(tree.replicas, [within[first].sums for first in peers])
            self._parts[tree] = within[self._places[self.rank][0]], between
        return self._parts[tree]

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        memory, why = self.node.common_memory(nbytes, summed=summed, carriers=self.carriers)
        missing = [text for text in self.inner.all_gather_object(why) if text]
        return (None, missing[0]) if missing else (memory, "")

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[Part],
        view: View,
        scale: float | None = None,
        *,
        label: str = "",
    ) -> None:
        def across(slice_: Array) -> None:
            assert self.across is not None
            self.across.all_reduce(slice_)

        self.node.sum_into(memory, parts, view, scale, across=across)

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
        if self.across is not None:
            told += f"\n{self.across.explain()}"
        return f"{told}\n{self.node.explain()}"
