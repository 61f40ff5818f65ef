"""Collectives of the ranks of one node, through shared memory.

In a reduction each rank combines one slice of all ranks' buffers, then reads the other slices from the other ranks.
Buffers in the window (shared memory that programs use as arrays) are combined where they lie; other buffers are first
copied into blocks.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_reduce_by_tree import AllReduceByTree
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.costs import measurement
from mpistrat.communicators.costs.distance import NBYTES, distance
from mpistrat.communicators.host_views import as_buffer_of, bytes_of, room_for, view_of
from mpistrat.communicators.node.blocks import Blocks
from mpistrat.communicators.node.common_memory import PAGE, CommonMemory
from mpistrat.communicators.node.memory import NodeMemory
from mpistrat.communicators.node.shared_memory import own_bytes, share
from mpistrat.communicators.node.slots import SharedSlots
from mpistrat.communicators.node.window import Window
from mpistrat.communicators.reduction.arithmetic import share_of
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transport import Move, Moves, Transport
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.machine.notices import warn_on_first_rank
from mpistrat.settings import shared_bytes

# In bytes. For smaller buffers slots or MPI are always faster: two meetings in Python take longer than MPI's message.
SMALLEST = 1 << 15
# the routes that are compared
MEMORY = "memory"
MPI = "MPI"


class BlocksTransport(Transport):
    """Moves buffers through `blocks`, the shared memory of a node's ranks.

    Called by: `WindowTransport`, for the collectives of `moves`, and the sizes that move faster this way than by MPI.
    """

    def __init__(self, blocks: Blocks, size: int) -> None:
        self.blocks = blocks
        self.rank = blocks.rank
        self._size = size

    def all_reduce(self, collective: AllReduce) -> None:
        how = collective.how()
        source = target = how.flat(collective.buffer)
        if collective.out is not None:
            target = how.flat(collective.out)
        self.blocks.all_reduce(how, source, target, collective.reduction.scale)

    def reduce(self, collective: Reduce) -> None:
        how = collective.how()
        source = how.flat(collective.buffer)
        self.blocks.all_reduce(how, source, source, None, [collective.root])

    def reduce_scatter(self, collective: ReduceScatter) -> None:
        source = bytes_of(collective.buffer)
        self.blocks.reduce_scatter(collective.how(), source, bytes_of(collective.out))

    def broadcast(self, collective: Broadcast) -> None:
        self.blocks.broadcast(bytes_of(collective.buffer), collective.root)

    def all_gather_into(self, collective: AllGatherInto) -> None:
        parts = list(bytes_of(collective.out).reshape(self._size, -1))
        self.blocks.gather(bytes_of(collective.buffer), parts)

    moves: ClassVar[Moves] = {
        AllReduce: all_reduce,
        AllReduceByTree: all_reduce,
        Reduce: reduce,
        ReduceScatter: reduce_scatter,
        Broadcast: broadcast,
        AllGatherInto: all_gather_into,
    }

    def explain(self, rest: str) -> str:
        return rest


class WindowTransport(Transport, NodeMemory):
    """Moves buffers of the ranks of a node, of at least 32 KB, through shared memory or by MPI.

    Args:
        mpi: the MPI transport of this communicator's ranks.
        watch: the rank's record of the calls that it waits in; ranks wait with its timeout.
        limit: the most bytes of shared memory that this process may make, of all communicators together. The smallest
            limit of a rank holds for all ranks.

    Attributes:
        why_not: the reason why the ranks share no memory; then MPI moves all bytes. "" if they can, or if none of them
            has tried yet.
        costs: the costs of blocks and of MPI; measured when the first large buffer comes.
        borders: sizes in bytes, from `costs`. A buffer outside the window goes through blocks from the first border
            on, by MPI from the second on, and so on.
        window: shared memory where buffers are combined in place; None until a program asks for a buffer there.
    """

    def __init__(
        self, mpi: MpiTransport, watch: CommunicatorWatch, limit: float = math.inf
    ) -> None:
        self.mpi = mpi
        self.rank = mpi.rank
        self.size = mpi.size
        self._watch = watch
        self._limit = limit
        self.why_not = ""
        self.costs = measurement.NOT_MEASURED
        self.borders: Sequence[float] = ()
        self._by_blocks: BlocksTransport | None = None
        self.window: Window | None = None

    # Memory

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        blocks = self.shared_blocks() if nbytes >= SMALLEST else None
        if blocks is None:
            return None
        if self.window is None or self.window.capacity < nbytes:
            # The new window takes no memory until it is written, and by then the old one is gone.
            instead_of = 0 if self.window is None else self.window.idle_bytes()
            segments, why = self._share(Window.nbytes_for(nbytes), instead_of, populate=False)
            if segments is None:
                if why:
                    self._warn(f"gradients are copied in blocks ({nbytes} bytes needed)", why)
                    self._limit = 0  # never try again
                return None
            self.window = Window(segments, self.rank, blocks)
            self.window_capacity = self.window.capacity
        return self.window.buffers.free(nbytes)

    def shared_blocks(self) -> Blocks | None:
        """Return the `Blocks`, shared memory for meetings of the ranks and copies of buffers. Collective.

        The first call makes them, and measures `costs`.

        Returns: None on all ranks if they cannot share memory; `why_not` says why.
        """
        if self._by_blocks is None and not self.why_not:
            segments, why = self._share(Blocks.NBYTES, populate=True)
            if segments is not None:
                blocks = Blocks(segments, self.rank, self._watch)
                self._by_blocks = BlocksTransport(blocks, self.size)
                self._measure(self._by_blocks)
                return blocks
            self.why_not = why or f"{shared_bytes.name} allows no {Blocks.NBYTES / 1e6:.1f} MB more"
            if why:
                self._warn("all messages go through MPI, and take longer", why)
        return None if self._by_blocks is None else self._by_blocks.blocks

    def shared_slots(self) -> SharedSlots | None:
        """Return new slots, shared memory for small calls; None if the ranks cannot share memory. Collective."""
        segments, _ = self._share(SharedSlots.nbytes_for(self.size), populate=True)
        return None if segments is None else SharedSlots(segments, self.rank)

    def common_memory(
        self,
        nbytes: int,
        *,
        summed: bool = False,
        senders: int | None = None,
        across: Callable[[Array], None] | None = None,
    ) -> tuple[CommonMemory | None, str]:
        """Make memory with one copy for all ranks of the node, as `NodeMemory.common_memory` does.

        Args:
            senders: only the first `senders` ranks own a slice; None: all ranks do.
            across: sums an array, this rank's slice, over the nodes, in place; None on a single node.

        Returns: the memory and ""; on all ranks None and the reason if they have no shared memory, or if the limit of a
            rank does not allow it.
        """
        blocks = self.shared_blocks()
        if blocks is None:
            return None, self.why_not
        gather = self.mpi.comm.allgather
        bounds = share_of(nbytes, PAGE, self.size, senders)[self.rank]
        more = bounds[1] - bounds[0]
        if summed:
            more += nbytes
        if min(gather(self._limit - own_bytes() - more)) < 0:
            return None, f"{shared_bytes.name} does not allow a rank {more / 1e6:.1f} MB more"
        return CommonMemory.make(nbytes, bounds, blocks, gather, summed=summed, across=across)

    def _share(
        self, nbytes: int, instead_of: int = 0, *, populate: bool
    ) -> tuple[list[np.ndarray] | None, str]:
        """Make a segment of `nbytes` on every rank, and map all of them, if every rank's limit allows it. Collective.

        Args:
            instead_of: bytes of shared memory that this rank will free, so they do not count.
            populate: True allocates all pages now; False allocates a page when a rank first writes it.

        Returns: the segments and ""; None and the reason if a rank could not make or map one; None and "" if a rank's
            limit does not allow them.
        """
        gather = self.mpi.comm.allgather
        if min(gather(self._limit - own_bytes() + instead_of)) < nbytes:
            return None, ""
        return share(nbytes, self.rank, gather, populate=populate)

    def _warn(self, what: str, why: str) -> None:
        warn_on_first_rank(self.rank, f"no shared memory on this node, so {what}: {why}")

    def _measure(self, by_blocks: BlocksTransport) -> None:
        """Measure `costs`, and compute `borders` from them. Collective."""
        crowded = any(self.mpi.comm.allgather(self._watch.crowded))
        segments = None
        if not crowded:
            segments, _ = self._share(NBYTES, populate=True)
        sizes = measurement.SIZES_ON_NODE
        written = measurement.written
        largest = sizes[-1] // 4

        @functools.cache  # made if needed
        def both() -> list[np.ndarray]:
            return [written(largest), written(largest)]

        def route(move: Move) -> Callable[[Array], None]:
            def all_reduce(zeros: Array) -> None:
                _, results = both()
                move(AllReduce(zeros, out=results[: len(zeros)]))

            return all_reduce

        self.costs = measurement.costs_of(
            {MEMORY: route(by_blocks.all_reduce), MPI: route(self.mpi.all_reduce)},
            Router(Transports(self.mpi)),
            self.mpi.library,
            [self.size],
            memory=measurement.BufferMemory("host", sizes, lambda length: both()[0][:length]),
            distance=lambda: distance(segments, self.rank, by_blocks.blocks.tick),
        )
        self.borders = self.costs.borders(MEMORY, MPI, SMALLEST)

    def _blocks_for(self, nbytes: int) -> Blocks | None:
        """Return the blocks for `all_gather` or `all_to_all`, if they are faster than MPI; else None. Collective.

        Args: nbytes: bytes of the largest buffer of a rank; the same on all ranks.
        """
        blocks = self.shared_blocks() if nbytes >= SMALLEST else None
        is_faster = bisect.bisect_right(self.borders, nbytes) % 2 == 1
        return blocks if is_faster else None

    # Collectives

    def choose(self, collective: Collective) -> Move | None:
        if collective.sizes_differ:
            return super().choose(collective)  # the ranks compare their sizes first
        move = BlocksTransport.moves.get(collective.__class__)
        nbytes = collective.buffer.nbytes
        if move is None or nbytes < SMALLEST or not collective.can_slice():
            return None
        if self._by_blocks is None:
            self.shared_blocks()
        by_blocks = self._by_blocks
        if by_blocks is None:
            return None
        window = self.window
        if (
            window is not None
            and isinstance(collective, AllReduce)
            and window.find(collective.buffer, collective.out)
        ):
            return self._all_reduce_in_window
        # As in `_blocks_for`; a method for both would be one call more in each sum.
        if bisect.bisect_right(self.borders, nbytes) % 2 == 0:
            return None
        return MethodType(move, by_blocks)

    def _all_reduce_in_window(self, collective: AllReduce) -> None:
        window: Any = self.window  # `choose` has found the buffers there
        nbytes = collective.buffer.nbytes
        window.all_reduce(collective.how(), nbytes, collective.reduction.scale)

    def all_gather(self, collective: AllGather) -> list[Array]:
        buffer = collective.buffer
        shapes = self.mpi.shapes_of(collective)
        largest = int(shapes.prod(axis=1).max()) * view_of(buffer).itemsize
        blocks = self._blocks_for(largest)
        if blocks is None:
            return self.mpi.all_gather(collective)
        parts = room_for(buffer, shapes)
        blocks.gather(bytes_of(buffer), [bytes_of(part) for part in parts])
        return [as_buffer_of(buffer, part) for part in parts]

    def all_to_all(self, collective: AllToAll) -> None:
        row_bytes = collective.row_bytes
        starts = np.array(self.mpi.starts_of(collective)) * row_bytes
        blocks = self._blocks_for(int(starts[:, -1].max()))
        if blocks is None:
            self.mpi.all_to_all(collective)
            return
        source = bytes_of(collective.buffer)
        received = [rows * row_bytes for rows in collective.received]
        blocks.all_to_all(source, bytes_of(collective.out), starts, received)

    moves: ClassVar[Moves] = {
        AllGather: all_gather,
        AllToAll: all_to_all,
    }

    def explain(self, rest: str) -> str:
        if self.why_not:
            return f"{self.size} ranks of a node, without shared memory: {self.why_not}\n{rest}"
        if self._by_blocks is None:
            return f"{self.size} ranks of a node, with nothing large combined yet\n{rest}"
        window = "none"
        if self.window is not None:
            window = f"up to {self.window.nbytes_for(self.window.capacity) / 1e6:.1f} MB, as far as it is used"
        return (
            f"{self.size} ranks of a node, through shared memory: buffers in the window, and other buffers "
            f"{self.costs.explain_from(*self.borders)}\n"
            f"    of each rank: {Blocks.NBYTES / 1e6:.1f} MB for blocks in flight; window: {window}\n"
            f"{rest}"
        )
