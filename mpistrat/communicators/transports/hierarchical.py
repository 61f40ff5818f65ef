"""Large buffers of ranks on several nodes: combined within each node, then slice by slice between the nodes.

Several ranks of a node, its senders, each send one slice of the node's result, so that no rank is the bottleneck. Each
byte crosses the network as often as if a node were one rank.
"""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_reduce_by_tree import AllReduceByTree
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.costs.measurement import NOT_MEASURED, Costs, costs_of
from mpistrat.communicators.costs.model import slowest
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.common_memory import CommonMemory
from mpistrat.communicators.node.memory import NodeMemory
from mpistrat.communicators.node.shared_memory import first_failure
from mpistrat.communicators.reduction import Reduction, reducing
from mpistrat.communicators.reduction.arithmetic import Arithmetic, scale, share_of
from mpistrat.communicators.reduction.tree import ReductionTree, tree_sum_of
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transport import Moves, Transport, by_others
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.pipelined import PipelinedTransport
from mpistrat.communicators.transports.window import MEMORY, MPI, WindowTransport

# For smaller buffers, the meetings within a node cost more time than the network saves.
SMALLEST = 1 << 16
# Names of routes (ways to move bytes). BY_NODE is MEMORY, within each node, followed by BETWEEN.
BY_NODE = "by node"
BETWEEN = "slices between nodes"


class HierarchicalTransport(Transport, NodeMemory):
    """Moves large buffers of ranks on several nodes, if that is faster than MPI over all ranks.

    It takes all-reduces, reductions to one rank and broadcasts of at least 64 KB. The first such call measures `costs`.

    Args:
        mpi: the transport over all ranks.
        node: the transport over the ranks of this node, through shared memory.
        pipelined: the transport over one rank of each node: the ranks with this rank's number on their nodes; None on
            ranks that send no slice.
        across: the communicator of the ranks of `pipelined`; None where `pipelined` is None.
        senders: number of ranks on the smallest node. On each node, the first so many ranks each send a slice.

    Attributes:
        costs: the costs of the routes; NOT_MEASURED before the first large buffer, and if a node has no shared memory.
        smallest: this transport takes buffers of at least so many bytes, according to `costs`.
    """

    def __init__(
        self,
        mpi: MpiTransport,
        node: WindowTransport,
        pipelined: PipelinedTransport | None,
        across: Communicator | None,
        senders: int,
    ) -> None:
        self.mpi = mpi
        self.node = node
        self.rank = mpi.rank
        self.size = mpi.size
        self.pipelined = pipelined
        self.across = across
        self.senders = senders
        self.costs = NOT_MEASURED
        self.smallest = float(SMALLEST)
        self._shared: bool | None = None
        self._within = Router(Transports(node.mpi, [node]))
        self._parts: dict[ReductionTree, tuple[ReductionTree, ReductionTree]] = {}
        # For each rank: its node, named by the node's first rank, and the rank's number there.
        first = node.mpi.comm.allgather(self.rank)[0]
        of_ranks: list[tuple[int, int]] = mpi.comm.allgather((first, node.rank))
        self._nodes, self._places = zip(*of_ranks, strict=True)

    def takes(self, collective: Collective) -> bool:
        nbytes = collective.buffer.nbytes
        if nbytes < SMALLEST or not collective.can_slice():
            return False
        return self._by_node(nbytes)

    def _by_node(self, nbytes: int) -> bool:
        """Whether this transport is faster than MPI for a buffer of `nbytes`. Collective; the first call measures.

        Returns: False if any node has no shared memory.
        """
        if self._shared is None:
            shares_here = self.node.shared_blocks() is not None
            self._shared = all(self.mpi.comm.allgather(shares_here))
            if self._shared:
                self._measure()
        return self._shared and nbytes >= self.smallest

    def _measure(self) -> None:
        """Measure `costs`, and compute `smallest` from them. Collective."""
        if self.pipelined is not None:
            self.pipelined.settle(self.senders)

        def between(buffer: np.ndarray) -> None:
            if self.across is not None:
                self.across.all_reduce(buffer[: len(buffer) // self.senders])

        ranks_of_nodes = list(collections.Counter(self._nodes).values())
        costs = costs_of(
            {BETWEEN: between, MPI: self.mpi.add_up},
            Router(Transports(self.mpi)),
            self.mpi.library,
            ranks_of_nodes,
            asleep=[BETWEEN],
        )
        nodes: list[Costs] = self.mpi.comm.allgather(self.node.costs)
        known = {}
        if all(of.routes for of in [costs, *nodes]):
            memory = slowest(node.routes[MEMORY] for node in nodes)
            by_node = memory.followed_by(costs.routes[BETWEEN])
            known = {BY_NODE: by_node, MEMORY: memory, **costs.routes}
        jobs = min(of.jobs for of in [costs, *nodes])
        self.costs = Costs(known, costs.origin, costs.disturbed, jobs=jobs)
        self.smallest = self.costs.cheaper_from(BY_NODE, MPI, SMALLEST)

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        if nbytes < SMALLEST or not self._by_node(nbytes):
            return None
        memory = self.node.window_buffer(nbytes)
        if nbytes > self.window_capacity:
            self.window_capacity = min(self.mpi.comm.allgather(self.node.window_capacity))
        return memory

    def common_memory(
        self, nbytes: int, *, summed: bool = False
    ) -> tuple[CommonMemory | None, str]:
        across = None if self.across is None else self.across.all_reduce
        memory, why = self.node.common_memory(
            nbytes, summed=summed, senders=self.senders, across=across
        )
        missing = first_failure(self.mpi.comm.allgather(why))
        if missing:
            return None, missing
        return memory, ""

    def all_reduce(self, collective: AllReduce) -> None:
        self._combine_by_node(collective, collective.how(), None)

    def all_reduce_by_tree(self, collective: AllReduceByTree) -> None:
        within, between = self._parts_of(collective.tree)
        how = tree_sum_of(collective.buffer.dtype, within)
        self._combine_by_node(collective, how, between)

    def _combine_by_node(
        self, collective: AllReduce, how: Arithmetic, between: ReductionTree | None
    ) -> None:
        """Combine within each node, then slice by slice between the nodes, and collect the slices within each node.

        If every rank of this node has its buffer in the window (shared memory), the buffers are combined there without
        a copy; else they are copied in blocks.

        Args:
            how: combines the ranks of this node.
            between: the order of additions over the nodes; None for any order.
        """
        blocks: Any = self.node.shared_blocks()  # `takes` has seen them
        window = self.node.window
        buffer = collective.buffer
        source = bytes_of(buffer)
        target = bytes_of(collective.target)
        bounds = share_of(len(source), how.itemsize, self.node.size, self.senders)
        first, end = bounds[self.node.rank]
        total = how.totals((end - first) // how.itemsize)
        if window is not None and not window.find(buffer, collective.out):
            window = None
        with blocks.unbroken:
            if window is None:
                blocks.combine_slice(how, source, bounds, total)
            else:
                window.combine(how, (first, end), total)
            if self.across is not None and first < end:
                total = _combined(self.across, total, collective.reduction, between)
            if window is not None:
                window.spread(how, (first, end), total)
                blocks.tick()  # no rank may go on while others read or write its memory
                return
            slices = [target[start:stop] for start, stop in bounds]
            own_slice = slices[self.node.rank]
            if first < end:
                how.view(own_slice)[:] = total
            blocks.gather(own_slice, slices)

    def broadcast(self, collective: Broadcast) -> None:
        """Send to all ranks of the root's node; its senders send slices to the other nodes; each node collects them."""
        blocks: Any = self.node.shared_blocks()  # `takes` has seen them
        memory = bytes_of(collective.buffer)
        node = self._nodes[collective.root]
        here = self._nodes[self.rank] == node
        if here:
            self._within.broadcast(memory, self._places[collective.root])
        bounds = share_of(len(memory), 1, self.node.size, self.senders)
        slices = [memory[start:stop] for start, stop in bounds]
        own_slice = slices[self.node.rank]
        if self.across is not None:
            self.across.broadcast(own_slice, self._peers().index(node))
        if not here:
            blocks.gather(own_slice, slices)

    moves: ClassVar[Moves] = {
        AllReduce: all_reduce,
        AllReduceByTree: all_reduce_by_tree,
        Reduce: by_others,
        Broadcast: broadcast,
    }

    def _peers(self) -> list[int]:
        """Return, for each rank of `across` in order, the lowest rank on its node: the node's number in `_nodes`."""
        of_ranks = zip(self._nodes, self._places, strict=True)
        return [first for first, place in of_ranks if place == self.node.rank]

    def _parts_of(self, tree: ReductionTree) -> tuple[ReductionTree, ReductionTree]:
        """Divide `tree`, an order of additions over all ranks, into two phases.

        Returns: the order of additions over this node's ranks; the order of additions over the nodes' sums, with the
            nodes in the order of the ranks of `across`, the communicator between the nodes.
        """
        if tree not in self._parts:
            nodes: dict[int, list[int]] = {}
            for rank, first in enumerate(self._nodes):
                nodes.setdefault(first, []).append(rank)
            within = {first: tree.within(ranks) for first, ranks in nodes.items()}
            sums_of_nodes = [within[first].sums for first in self._peers()]
            between = ReductionTree(tree.replicas, sums_of_nodes)
            own_node = self._nodes[self.rank]
            self._parts[tree] = within[own_node], between
        return self._parts[tree]

    def explain(self, rest: str) -> str:
        nodes = len(set(self._nodes))
        if self._shared is False:
            sizes = "never, because a node has no shared memory"
        else:
            sizes = self.costs.explain_from(self.smallest)
        text = f"{self.size} ranks on {nodes} nodes: by node, in {self.senders} slices between the nodes, {sizes}\n"
        if self.across is not None:
            text += f"{self.across.explain()}\n"
        return text + self.node.explain(self.node.mpi.explain())


def _combined(
    across: Communicator, total: Array, reduction: Reduction, between: ReductionTree | None
) -> Array:
    """Combine a sender's slice with the same slice of the other nodes.

    Args:
        across: the communicator of the ranks that send this slice, one on each node.
        total: this node's sum of the slice, not scaled yet; it is overwritten.
        between: the order of additions over the nodes; None for any order.

    Returns: the result, times the scale of `reduction`: `total`, or its first row with a tree.
    """
    if between is None:
        plain = reducing(reduction.op)
        if reduction.compressor is not None:
            plain = plain.compressed_by(reduction.compressor)
        across.all_reduce(total, plain)
    else:
        slices = total.reshape(len(between.held[across.rank]), -1)
        across.all_reduce_by_tree(slices, between)
        total = slices[0]
    scale(total, reduction.scale)
    return total
