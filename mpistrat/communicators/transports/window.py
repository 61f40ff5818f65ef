"""Collectives of the ranks of one node through memory that they share.

A reduction is a reduce-scatter straight out of the peers' memory, then a copy of the rest: each rank combines one slice
of every rank's buffer. What lies in the window already is combined where it is, and nothing is copied in.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.arithmetic import arithmetic_of
from mpistrat.communicators.costs.measurement import Costs, Way, costs_of, from_bytes
from mpistrat.communicators.host_views import as_buffer_of, bytes_of, view_of
from mpistrat.communicators.node.blocks import Blocks, Window, share_of
from mpistrat.communicators.node.common_memory import PAGE, CommonMemory, Part, View
from mpistrat.communicators.node.shared_memory import own_bytes, share
from mpistrat.communicators.node.slots import SharedSlots
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.transport import Mover, Transport
from mpistrat.liveness.watch import CommunicatorWatch
from mpistrat.settings import shared_bytes

# Below, MPI is not even compared with: two meetings in Python cost more than its whole message.
SMALLEST = 1 << 15
MEMORY, MPI = "memory", "MPI"  # the ways that are compared


class WindowTransport(Transport):
    """Large buffers of ranks of one node.

    Args:
        mpi: over the same ranks.
        watch: where ranks that wait are watched.
        limit: the most bytes that this process may share, in all; ranks go by who may share the least.

    Attributes:
        why_not: why there is no shared memory, where there is none: then this takes nothing.
        costs: of its ways; known once there is memory, at the first large buffer.
        smallest: bytes from which on a buffer outside the window is combined through blocks, by these costs.
        blocks: for what does not lie in the window; None until the ranks share memory.
        window: for what lies in it; None until something has asked for a place there.
    """

    def __init__(
        self, mpi: MpiTransport, watch: CommunicatorWatch, limit: float = math.inf
    ) -> None:
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self._watch, self._limit = watch, limit
        self.why_not = ""
        self.costs = Costs()
        self.smallest = 0.0
        self.blocks: Blocks | None = None
        self.window: Window | None = None

    @property
    def window_capacity(self) -> int:
        """Up to so many bytes, `window_buffer` is not collective."""
        return 0 if self.window is None else self.window.capacity

    # Memory

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """`nbytes` of the window, uninitialized, to be combined where they are; None where there is no room.

        Collective, with equal `nbytes`; but each rank may or may not get one. The memory is used again once nothing
        refers to it.
        """
        if nbytes < SMALLEST or not self.is_shared():
            return None
        if self.window is None or self.window.capacity < nbytes:
            # The one in its place holds no memory until it is written, and then this one is gone.
            instead_of = 0 if self.window is None else self.window.idle_bytes()
            segments, why = self._share(Window.nbytes_for(nbytes), instead_of, populate=False)
            if segments is None:
                if why:
                    self._warn(f"gradients are copied into some: {nbytes} bytes cannot be had", why)
                    self._limit = 0  # asked for no more
                return None
            assert self.blocks is not None
            self.window = Window(segments, self.rank, self.blocks)
        return self.window.take(nbytes)

    def is_shared(self) -> bool:
        """Whether the ranks can share memory, which is tried at the first call. Collective."""
        if self.blocks is None and not self.why_not:
            segments, why = self._share(Blocks.NBYTES, populate=True)
            if segments is None:
                self.why_not = (
                    why or f"{shared_bytes.name} allows no {Blocks.NBYTES / 1e6:.1f} MB more"
                )
                if why:
                    self._warn("all messages go through MPI, which is slower", why)
            else:
                self.blocks = Blocks(segments, self.rank, self._watch)
                self._measure(self.blocks)
        return self.blocks is not None

    def shared_slots(self) -> SharedSlots | None:
        """For small sums; None where the ranks cannot share memory. Collective."""
        segments, _ = self._share(SharedSlots.NBYTES, populate=True)
        return None if segments is None else SharedSlots(segments, self.rank)

    def common_memory(
        self, nbytes: int, *, summed: bool = False, carriers: int | None = None
    ) -> tuple[CommonMemory | None, str]:
        """As of any communicator. `carriers`: how many ranks, from the first, have a slice; None is all."""
        if not self.is_shared():
            return None, self.why_not
        gather = self.mpi.all_gather_object
        bounds = share_of(nbytes, PAGE, self.size, carriers)[self.rank]
        own = bounds[1] - bounds[0] + (nbytes if summed else 0)
        if min(gather(self._limit - own_bytes() - own)) < 0:
            return None, f"{shared_bytes.name} does not allow a rank {own / 1e6:.1f} MB more"
        return CommonMemory.make(nbytes, bounds, self.rank, gather, summed=summed)

    def _share(
        self, nbytes: int, instead_of: int = 0, *, populate: bool
    ) -> tuple[list[np.ndarray] | None, str]:
        """As `share`; None without a reason where a rank may not share as much `instead_of` bytes that it has."""
        gather = self.mpi.all_gather_object
        if min(gather(self._limit - own_bytes() + instead_of)) < nbytes:
            return None, ""
        return share(nbytes, self.rank, gather, populate=populate)

    def _warn(self, what: str, why: str) -> None:
        if self.rank == 0:
            warnings.warn(
                f"no shared memory on this node, so {what}: {why}", RuntimeWarning, stacklevel=2
            )

    def _measure(self, blocks: Blocks) -> None:
        """From which size on memory is faster than MPI."""
        ways: dict[str, Way] = {
            MEMORY: lambda zeros: blocks.all_reduce(zeros, SUM),
            MPI: lambda zeros: self.mpi.all_reduce(zeros, SUM),
        }
        self.costs = costs_of(ways, Router([self.mpi]), self.mpi.library, [self.size])
        self.smallest = self.costs.cheaper_from(MEMORY, MPI, SMALLEST)

    # Collectives

    def choose(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Mover | None:
        """Several sums of a rank are MPI's: a tree has them only where ranks have 3, 5, 6, 7, … replicas."""
        if call == "all_gather":
            return self  # which of all parts is the largest must be asked first
        if buffer.nbytes < SMALLEST or not (tree is None or tree.one_each):
            return None
        if call != "broadcast" and arithmetic_of(buffer, reduction.op) is None:
            return None
        if not self.is_shared():
            return None
        if call == "all_reduce" and self.window is not None and self.window.find(buffer, out):
            return self.window
        return self.blocks if buffer.nbytes >= self.smallest else None

    def all_gather(self, buffer: Array) -> list[Array]:
        shapes = self.mpi.shapes_of(buffer)
        view = view_of(buffer)
        largest = int(shapes.prod(axis=1).max()) * view.itemsize
        large = largest >= SMALLEST and self.is_shared() and largest >= self.smallest
        if self.blocks is None or not large:
            return self.mpi.all_gather(buffer, shapes)
        parts = [np.empty(tuple(shape) if buffer.ndim else (), view.dtype) for shape in shapes]
        self.blocks.gather(bytes_of(buffer), [bytes_of(part) for part in parts])
        return [as_buffer_of(buffer, part) for part in parts]

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[Part],
        view: View,
        scale: float | None,
        across: Callable[[Array], None] | None = None,
    ) -> None:
        """As of any communicator. `across`: combines a slice in place with those of other nodes."""
        assert self.blocks is not None
        with self.blocks:
            self.blocks.tick()  # all contributions are there, and nobody reads the last sum
            memory.sum_slice(parts, view, scale, across)
            self.blocks.tick()  # all slices are there, and nobody reads contributions

    def explain(self, rest: str) -> str:
        if self.why_not:
            return f"{self.size} ranks of a node, without shared memory: {self.why_not}\n{rest}"
        if self.blocks is None:
            return f"{self.size} ranks of a node, which have combined nothing large yet\n{rest}"
        window = "none"
        if self.window is not None:
            window = f"up to {self.window.nbytes_for(self.window.capacity) / 1e6:.1f} MB, as far as it is used"
        return (
            f"{self.size} ranks of a node, through shared memory: what lies in its window, and all else "
            f"{from_bytes(self.smallest)}; of S bytes an all-reduce takes\n{self.costs.explain()}\n"
            f"    of each rank: {Blocks.NBYTES / 1e6:.1f} MB for blocks in flight; window: {window}\n"
            f"{rest}"
        )
