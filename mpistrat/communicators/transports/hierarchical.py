"""Ranks of several nodes: large buffers are combined within each node, then slice by slice between the nodes.

Every rank of a node carries its slice, so that no one of them is the bottleneck, and each byte of a node crosses the
network as often as if the node were one rank.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.costs.measurement import (
    SECONDS_BETWEEN_NODES,
    Costs,
    Way,
    costs_of,
    from_bytes,
)
from mpistrat.communicators.costs.model import slowest
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.blocks import how_to_add, share_of
from mpistrat.communicators.node.common_memory import CommonMemory, Part, View
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.pipelined import PipelinedTransport
from mpistrat.communicators.transports.transport import Transport
from mpistrat.communicators.transports.window import MEMORY, MPI, WindowTransport

# Below, what is saved on the network is less than what the meetings within a node cost.
SMALLEST = 1 << 16
_CALLS = frozenset(["all_reduce", "reduce", "broadcast"])
BY_NODE, BETWEEN = "by node", "slices between nodes"  # the former is memory, followed by the latter


class HierarchicalTransport(Transport):
    """Large buffers of ranks on several nodes.

    Args:
        mpi: over all ranks.
        node: over this node's.
        pipelined: over the ranks that stand where this one stands on their nodes; None where some node has none.
        across: the same ranks, by every way; None where `pipelined` is.
        carriers: the ranks of the smallest node: as many of each carry a slice.

    Attributes:
        costs: of its ways; known once the nodes have memory, at the first large buffer.
        smallest: bytes from which on a buffer goes by node, by these costs.
        window_capacity: up to so many bytes, `window_buffer` is not collective.
    """

    def __init__(
        self,
        mpi: MpiTransport,
        node: WindowTransport,
        pipelined: PipelinedTransport | None,
        across: Communicator | None,
        carriers: int,
    ) -> None:
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.node, self.pipelined, self.across, self.carriers = node, pipelined, across, carriers
        self._all, self._within = Router([mpi]), Router([node, node.mpi])
        self._shared: bool | None = None
        self._parts: dict[ReductionTree, tuple[ReductionTree, ReductionTree]] = {}
        self.costs = Costs()
        self.smallest = float(SMALLEST)
        self.window_capacity = 0
        # By rank: the rank that is the first of its node, and its place there.
        first = node.mpi.all_gather_object(self.rank)[0]
        self._places: list[tuple[int, int]] = mpi.all_gather_object((first, node.rank))

    def choose(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Transport | None:
        """Ranks of a node whose replicas are no neighbours have several sums to carry: they are MPI's."""
        if call not in _CALLS or not (tree is None or tree.one_each):
            return None
        if buffer.nbytes < SMALLEST:
            return None
        if call != "broadcast" and arithmetic_of(buffer, reduction.op) is None:
            return None
        return self if self._by_node(int(buffer.nbytes)) else None

    def _by_node(self, nbytes: int) -> bool:
        """Collective."""
        if self._shared is None:
            self._shared = all(self.mpi.all_gather_object(self.node.is_shared()))
            if self._shared:
                self._measure()
        return self._shared and nbytes >= self.smallest

    def _measure(self) -> None:
        """From which size on going by node is faster than MPI over all ranks."""
        if self.pipelined is not None:
            self.pipelined.settle(self.carriers)

        def between(buffer: np.ndarray) -> None:
            if self.across is not None:
                self.across.all_reduce(buffer[: len(buffer) // self.carriers])

        ways: dict[str, Way] = {BETWEEN: between, MPI: self._all.all_reduce}
        ranks_of_nodes = list(collections.Counter(first for first, _ in self._places).values())
        mpi = self.mpi.library
        costs = costs_of(
            ways, self._all, mpi, ranks_of_nodes, asleep=[BETWEEN], seconds=SECONDS_BETWEEN_NODES
        )
        nodes: list[Costs] = self.mpi.all_gather_object(self.node.costs)
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
            self.window_capacity = min(self.mpi.all_gather_object(self.node.window_capacity))
        return memory

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> None:
        """Within the node, slice by slice between the nodes, and within the node again."""
        blocks, window = self.node.blocks, self.node.window
        assert blocks is not None
        within, between = (None, None) if tree is None else self._parts_of(tree)
        how = how_to_add(buffer, reduction, within)
        source, target = bytes_of(buffer), bytes_of(buffer if out is None else out)
        bounds = share_of(len(source), how.itemsize, self.node.size, self.carriers)
        first, end = bounds[self.node.rank]
        total = how.totals((end - first) // how.itemsize)
        places = None if window is None else window.find(buffer, out)
        with blocks:
            if window is not None and places is not None:
                window.combine(how, places, (first, end), total)
            else:
                blocks.combine_slice(how, source, bounds, total)
            if first < end:
                total = self._across(total, reduction, between)
            if window is not None and places is not None:
                window.spread(how, places, (first, end), total)
                blocks.tick()  # nobody goes on while others read or write its memory
                return
            if first < end:
                how.view(target[first:end])[:] = total
            blocks.gather(target[first:end], [target[start:stop] for start, stop in bounds])

    def _across(self, total: Array, reduction: Reduction, between: ReductionTree | None) -> Array:
        """A carrier's slice, combined with those of other nodes."""
        assert self.across is not None
        if between is None:
            part = Reduction(reduction.op, compressor=reduction.compressor)
            self.across.all_reduce(total, part)
        else:
            slices = total.reshape(len(between.held[self.across.rank]), -1)
            self.across.all_reduce_by_tree(slices, between)
            total = slices[0]
        if reduction.scale is not None:
            with np.errstate(all="ignore"):
                total *= reduction.scale
        return total

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
        missing = [text for text in self.mpi.all_gather_object(why) if text]
        return (None, missing[0]) if missing else (memory, "")

    def sum_into(
        self, memory: CommonMemory, parts: Sequence[Part], view: View, scale: float | None
    ) -> None:
        def across(slice_: Array) -> None:
            assert self.across is not None
            self.across.all_reduce(slice_)

        self.node.sum_into(memory, parts, view, scale, across)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Within the root's node, from each of its carriers to those of the other nodes, and within these."""
        memory = bytes_of(buffer)
        node, place = self._places[root]
        here = self._places[self.rank][0] == node
        if here:
            self._within.broadcast(memory, place)
        bounds = share_of(len(memory), 1, self.node.size, self.carriers)
        first, end = bounds[self.node.rank]
        if self.across is not None:
            self.across.broadcast(memory[first:end], self._across_rank(node))
        if not here:
            assert self.node.blocks is not None
            slices = [memory[start:stop] for start, stop in bounds]
            self.node.blocks.gather(slices[self.node.rank], slices)

    def _across_rank(self, node: int) -> int:
        """That of the rank of `node` which stands where this one stands on its own."""
        peers = [first for first, place in self._places if place == self.node.rank]
        return peers.index(node)

    def explain(self, rest: str) -> str:
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
        return f"{told}\n{self.node.explain(self.node.mpi.explain())}"
