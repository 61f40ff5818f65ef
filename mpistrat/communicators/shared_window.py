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
from mpistrat.cluster_resolver.shared_memory_limit import SHARED_MB
from mpistrat.communicators.arithmetic import Arithmetic, arithmetic_of
from mpistrat.communicators.common_memory import PAGE, CommonMemory, Part, View
from mpistrat.communicators.communicator import Wire
from mpistrat.communicators.host_views import as_buffer_of, bytes_of, view_of
from mpistrat.communicators.mpi import MpiCommunicator
from mpistrat.communicators.node_memory import NOWHERE, Scratch, Window, share_of
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.selection import Costs, Way, costs_of, from_bytes
from mpistrat.communicators.shared_memory import own_bytes, share
from mpistrat.communicators.station import Station
from mpistrat.communicators.tree_sum import tree_sum_of
from mpistrat.communicators.wrapping import WrappingCommunicator

# Below, MPI is not even compared with: two meetings in Python cost more than its whole message.
SMALLEST = 1 << 15
MEMORY, MPI = "memory", "MPI"  # the ways that are compared


class SharedWindowCommunicator(WrappingCommunicator):
    """Wraps the communicator of a node's ranks, which moves what is small, or not numbers.

    Args:
        inner: over ranks of one node.
        station: where ranks that wait are watched.
        limit: the most bytes that this process may share, in all; ranks go by who may share the least.

    Attributes:
        why_not: why there is no shared memory, where there is none: then `inner` does everything.
        costs: of its ways; known once there is memory, at the first large buffer.
        smallest: bytes from which on a buffer outside the window is combined through it, by these costs.
    """

    inner: MpiCommunicator
    has_window = True

    def __init__(self, inner: MpiCommunicator, station: Station, limit: float = math.inf) -> None:
        super().__init__(inner)
        self._station, self._limit = station, limit
        self.why_not = ""
        self.costs = Costs()
        self.smallest = 0.0
        self._scratch: Scratch | None = None
        self._window: Window | None = None

    # Memory

    def window_buffer(self, nbytes: int) -> np.ndarray | None:
        """`nbytes` of the window, uninitialized, to be combined where they are; None where there is no room.

        Collective, with equal `nbytes`; but each rank may or may not get one. The memory is used again once nothing
        refers to it.
        """
        if nbytes < SMALLEST or not self.is_shared():
            return None
        if self._window is None or self._window.capacity < nbytes:
            # The one in its place holds no memory until it is written, and then this one is gone.
            instead_of = 0 if self._window is None else self._window.idle_bytes()
            segments, why = self._share(Window.nbytes_for(nbytes), instead_of, populate=False)
            if segments is None:
                if why:
                    self._warn(f"gradients are copied into some: {nbytes} bytes cannot be had", why)
                    self._limit = 0  # asked for no more
                return None
            self._window = Window(segments, self.rank)
            self.window_capacity = self._window.capacity
        return self._window.take(nbytes)

    def is_shared(self) -> bool:
        """Whether the ranks can share memory, which is tried at the first call. Collective."""
        if self._scratch is None and not self.why_not:
            segments, why = self._share(Scratch.NBYTES, populate=True)
            if segments is None:
                self.why_not = why or f"{SHARED_MB} allows no {Scratch.NBYTES / 1e6:.1f} MB more"
                if why:
                    self._warn("all messages go through MPI, which is slower", why)
            else:
                self._scratch = Scratch(segments, self.rank, self._station)
                self._measure(self._scratch)
        return self._scratch is not None

    def common_memory(
        self, nbytes: int, *, summed: bool = False, carriers: int | None = None
    ) -> tuple[CommonMemory | None, str]:
        """As of any communicator. `carriers`: how many ranks, from the first, have a slice; None is all."""
        if not self.is_shared():
            return None, self.why_not
        gather = self.inner.all_gather_object
        bounds = share_of(nbytes, PAGE, self.size, carriers)[self.rank]
        own = bounds[1] - bounds[0] + (nbytes if summed else 0)
        if min(gather(self._limit - own_bytes() - own)) < 0:
            return None, f"{SHARED_MB} does not allow a rank {own / 1e6:.1f} MB more"
        return CommonMemory.make(nbytes, bounds, self.rank, gather, summed=summed)

    def _share(
        self, nbytes: int, instead_of: int = 0, *, populate: bool
    ) -> tuple[list[np.ndarray] | None, str]:
        """As `share`; None without a reason where a rank may not share as much `instead_of` bytes that it has."""
        gather = self.inner.all_gather_object
        if min(gather(self._limit - own_bytes() + instead_of)) < nbytes:
            return None, ""
        return share(nbytes, self.rank, gather, populate=populate)

    def _warn(self, what: str, why: str) -> None:
        if self.rank == 0:
            warnings.warn(
                f"no shared memory on this node, so {what}: {why}", RuntimeWarning, stacklevel=2
            )

    def _measure(self, scratch: Scratch) -> None:
        """From which size on memory is faster than MPI."""

        def through_memory(buffer: np.ndarray) -> None:
            how, memory = arithmetic_of(buffer, "sum"), bytes_of(buffer)
            assert how is not None
            scratch.all_reduce(how, memory, memory, None)

        ways: dict[str, Way] = {MEMORY: through_memory, MPI: self.inner.all_reduce}
        self.costs = costs_of(ways, self.inner, self.inner.library, [self.size])
        self.smallest = self.costs.cheaper_from(MEMORY, MPI, SMALLEST)

    def _through_memory(self, nbytes: int) -> Scratch | None:
        """What to use for a buffer of so many bytes, or None to use MPI. Collective."""
        large = nbytes >= SMALLEST and self.is_shared() and nbytes >= self.smallest
        return self._scratch if large else None

    # Collectives

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
        if how is None or not self._all_reduce_here(how, buffer, out, scale):
            if buffer.nbytes < SMALLEST or self._scratch is not None:
                wire = None  # a message as short costs what an empty one does; nor do ranks that share memory need it
            self.inner.all_reduce(buffer, op, out=out, scale=scale, wire=wire)

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, *, label: str = "", scale: float | None = None
    ) -> None:
        """Several sums of a rank go over MPI: that is the case only if ranks have 3, 5, 6, 7, … replicas."""
        if not tree.one_each or not self._all_reduce_here(
            tree_sum_of(sums, tree), sums, None, scale
        ):
            self.inner.all_reduce_by_tree(sums, tree, scale=scale)

    def _all_reduce_here(
        self, how: Arithmetic, buffer: Array, out: Array | None, scale: float | None
    ) -> bool:
        """Combine through memory, if that is the way for a buffer of this size and place. Collective."""
        nbytes = int(buffer.nbytes)
        if nbytes < SMALLEST or not self.is_shared():
            return False
        scratch, window = self._scratch, self._window
        assert scratch is not None
        source, target = bytes_of(buffer), bytes_of(buffer if out is None else out)
        with scratch:
            if window is not None and nbytes <= window.capacity:
                places = scratch.tell(NOWHERE if out is not None else window.place_of(source))
                if NOWHERE not in places:
                    window.all_reduce(how, places, nbytes, scale)
                    scratch.tick()  # nobody goes on while others read or write its memory
                    return True
            if nbytes >= self.smallest:
                scratch.all_reduce(how, source, target, scale)
                return True
        return False

    def all_reduce_across(
        self,
        buffer: Array,
        how: Arithmetic,
        out: Array | None,
        scale: float | None,
        carriers: int,
        across: Callable[[Array], Array],
    ) -> None:
        """Combine `buffer` of this node's ranks and, slice by slice, of others'; where memory is shared.

        Args:
            carriers: how many ranks, from the first, combine a slice of equal size each.
            across: given a carrier's combined slice, as `how.totals` has it, combines it in place with those of other
                nodes; returns the elements.
        """
        scratch, window = self._scratch, self._window
        assert scratch is not None
        nbytes = int(buffer.nbytes)
        source, target = bytes_of(buffer), bytes_of(buffer if out is None else out)
        bounds = share_of(nbytes, how.itemsize, self.size, carriers)
        first, end = bounds[self.rank]
        total = how.totals((end - first) // how.itemsize)
        with scratch:
            places = [NOWHERE]
            if window is not None and nbytes <= window.capacity:
                places = scratch.tell(NOWHERE if out is not None else window.place_of(source))
            in_window = window if NOWHERE not in places else None
            if in_window is not None:
                in_window.combine(how, places, (first, end), total)
            else:
                scratch.reduce_scatter(how, source, bounds, total)
            if first < end:
                total = across(total)
                if scale is not None:
                    with np.errstate(all="ignore"):
                        total *= scale
            if in_window is not None:
                in_window.spread(how, places, (first, end), total)
                scratch.tick()  # nobody goes on while others read or write its memory
            else:
                if first < end:
                    how.view(target[first:end])[:] = total
                scratch.all_gather(
                    target[first:end], [target[start:stop] for start, stop in bounds]
                )

    def sum_into(
        self,
        memory: CommonMemory,
        parts: Sequence[Part],
        view: View,
        scale: float | None = None,
        *,
        label: str = "",
        across: Callable[[Array], None] | None = None,
    ) -> None:
        """As of any communicator. `across`: combines a slice in place with those of other nodes."""
        assert self._scratch is not None
        with self._scratch:
            self._scratch.tick()  # all contributions are there, and nobody reads the last sum
            memory.sum_slice(parts, view, scale, across)
            self._scratch.tick()  # all slices are there, and nobody reads contributions

    def gather_slices(self, memory: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
        """Fill `memory` with every rank's slice of it, between its bounds in bytes; where memory is shared."""
        assert self._scratch is not None
        slices = [memory[first:end] for first, end in bounds]
        with self._scratch:
            self._scratch.all_gather(slices[self.rank], slices)

    def reduce_scatter(
        self, buffer: Array, out: Array, op: str = "sum", *, label: str = ""
    ) -> None:
        nbytes, how = int(buffer.nbytes), arithmetic_of(buffer, op)
        scratch = None if how is None else self._through_memory(nbytes)
        if how is None or scratch is None:
            self.inner.reduce_scatter(buffer, out, op)
            return
        bounds = share_of(nbytes, nbytes // self.size, self.size)
        with scratch:
            scratch.reduce_scatter(how, bytes_of(buffer), bounds, how.view(bytes_of(out)))

    def reduce(self, buffer: Array, root: int = 0, op: str = "sum", *, label: str = "") -> None:
        how = arithmetic_of(buffer, op)
        scratch = None if how is None else self._through_memory(int(buffer.nbytes))
        if how is None or scratch is None:
            self.inner.reduce(buffer, root, op)
            return
        memory = bytes_of(buffer)
        with scratch:
            scratch.all_reduce(how, memory, memory if self.rank == root else None, None)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        scratch = self._through_memory(int(buffer.nbytes))
        if scratch is None:
            self.inner.broadcast(buffer, root)
            return
        with scratch:
            scratch.broadcast(bytes_of(buffer), root)

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        shapes = self.inner.shapes_of(buffer)
        view = view_of(buffer)
        largest = int(shapes.prod(axis=1).max()) * view.itemsize
        scratch = self._through_memory(largest)
        if scratch is None:
            return self.inner.all_gather(buffer, shapes=shapes)
        parts = [np.empty(tuple(shape) if buffer.ndim else (), view.dtype) for shape in shapes]
        with scratch:
            scratch.all_gather(bytes_of(buffer), [bytes_of(part) for part in parts])
        return [as_buffer_of(buffer, part) for part in parts]

    def explain(self) -> str:
        if self.why_not:
            return f"{self.size} ranks of a node, without shared memory: {self.why_not}\n{self.inner.explain()}"
        if self._scratch is None:
            return f"{self.size} ranks of a node, which have combined nothing large yet\n{self.inner.explain()}"
        window = "none"
        if self._window is not None:
            window = f"up to {self._window.nbytes_for(self._window.capacity) / 1e6:.1f} MB, as far as it is used"
        return (
            f"{self.size} ranks of a node, through shared memory: what lies in its window, and all else "
            f"{from_bytes(self.smallest)}; of S bytes an all-reduce takes\n{self.costs.explain()}\n"
            f"    of each rank: {Scratch.NBYTES / 1e6:.1f} MB for blocks in flight; window: {window}\n"
            f"{self.inner.explain()}"
        )
