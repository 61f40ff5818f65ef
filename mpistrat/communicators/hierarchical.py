"""Ranks of several nodes: large buffers are combined within each node, then slice by slice between the nodes.

Every rank of a node carries its slice, so that no one of them is the bottleneck, and each byte of a node crosses the
network as often as if the node were one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, copy
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.common_memory import CommonMemory, Part, View
from mpistrat.communicators.communicator import Communicator, Wire
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node_memory import share_of
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.shared_window import SharedWindowCommunicator
from mpistrat.communicators.tree_sum import tree_sum_of
from mpistrat.communicators.wrapping import WrappingCommunicator

# Below, what is saved on the network is less than what the meetings within a node cost.
SMALLEST = 1 << 16


class HierarchicalCommunicator(WrappingCommunicator):
    """Wraps the communicator of all ranks, which moves what is small, or not numbers.

    Args:
        inner: over all ranks.
        node: over this node's.
        across: over the ranks that stand where this one stands on their nodes; None where some node has none.
        carriers: the ranks of the smallest node: as many of each carry a slice.
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
        self._parts: dict[ReductionTree, tuple[ReductionTree, ReductionTree]] = {}
        # By rank: the rank that is the first of its node, and its place there.
        first = node.all_gather_object(self.rank)[0]
        self._places: list[tuple[int, int]] = inner.all_gather_object((first, node.rank))

    def _goes_by_node(self, buffer: Array, op: str) -> bool:
        if buffer.nbytes < SMALLEST or arithmetic_of(buffer, op) is None:
            return False
        if self._shared is None:
            everywhere = np.array(self.node.is_shared(), np.int32)
            self.inner.all_reduce(everywhere, "min")
            self._shared = bool(everywhere)
        return self._shared

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        if nbytes < SMALLEST:
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
        by_node = "once something large has been combined" if self._shared is None else "always"
        if self._shared is False:
            by_node = "never, for a node has no shared memory"
        return (
            f"{self.size} ranks on {nodes} nodes: from {SMALLEST} bytes on by node ({by_node}), in {self.carriers} "
            f"slices between the nodes\n{self.node.explain()}"
        )
