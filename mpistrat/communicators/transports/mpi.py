"""`MpiTransport`: moves buffers in host memory by MPI.

mpi4py is imported at the top of this file, and this file on first use, so that `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, dtype_name, is_torch, itemsize, num_elements
from mpistrat.cluster_resolver.launcher import library_name
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_reduce_by_tree import AllReduceByTree
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.host_views import as_buffer_of, bytes_of, parts_with_own, view_of
from mpistrat.communicators.reduction import OPS as NAMES_OF_OPS
from mpistrat.communicators.reduction.arithmetic import (
    KNOWN_TO_MPI,
    SUMMED_AS_FLOAT32,
    Arithmetic,
    scale,
    share_of,
)
from mpistrat.communicators.reduction.as_float32 import reduce_in_place
from mpistrat.communicators.transport import Moves, Transport

OPS: dict[str, MPI.Op] = {name: getattr(MPI, name.upper()) for name in NAMES_OF_OPS}
# From this many bytes on, exchanging floats of 16 and 8 bits twice takes less time than one MPI reduction of float32.
_SMALLEST_IN_SLICES = 1 << 15
# Up to this many bytes on all ranks together, each rank adds up all sums, because a second message takes longer.
_WHOLE = 1 << 15


class MpiTransport(Transport):
    """Moves buffers by MPI's own messages. It takes every collective, so a router asks it last.

    Other transports use it, too.

    Args:
        comm: an mpi4py communicator that nobody else uses.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.thread_multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def all_reduce(self, collective: AllReduce) -> None:
        buffer = collective.buffer
        reduction = collective.reduction
        op = OPS[reduction.op]
        name = dtype_name(buffer)
        if name.startswith(SUMMED_AS_FLOAT32):
            if buffer.nbytes < _SMALLEST_IN_SLICES:
                reduce_in_place(
                    buffer,
                    collective.out,
                    reduction.scale,
                    lambda wide: self.comm.Allreduce(MPI.IN_PLACE, view_of(wide), op),
                )
                return
            total = bytes_of(collective.target)
            sums = [bytes_of(buffer)]
            held = [1] * self.size
            _all_reduce_in_slices(self.comm, collective.how(), sums, held, total, reduction.scale)
            return
        if is_torch(buffer) and name not in KNOWN_TO_MPI:
            raise TypeError(f"MPI cannot reduce {name}; convert it to float32 first")
        target = collective.target
        source: Any = MPI.IN_PLACE
        if collective.out is not None:
            source = view_of(buffer)
        self.comm.Allreduce(source, view_of(target), op)
        scale(target, reduction.scale)

    def all_reduce_by_tree(self, collective: AllReduceByTree) -> None:
        """Add up the sums of all ranks in the tree's order. Collective.

        Each rank adds up one slice and sends it to all ranks; small sums are added up as a whole on each rank.
        """
        comm = self.comm
        factor = collective.reduction.scale
        how = collective.how()
        held = [len(parts) for parts in collective.tree.held]
        memory = bytes_of(collective.buffer).reshape(held[comm.rank], -1)
        nbytes = memory.shape[1]
        if not nbytes:
            return
        if nbytes * comm.size > _WHOLE:
            _all_reduce_in_slices(comm, how, list(memory), held, memory[0], factor)
            return
        gathered = np.empty((sum(held), nbytes), np.uint8)
        if collective.tree.one_each:
            comm.Allgather(memory, gathered)
        else:
            comm.Allgatherv(memory, [gathered, [number * nbytes for number in held]])
        pieces = [how.view(piece) for piece in gathered]
        how.combine(pieces, how.view(memory[0]), factor)

    def reduce(self, collective: Reduce) -> None:
        buffer = collective.buffer
        root = collective.root
        op = OPS[collective.reduction.op]
        if dtype_name(buffer) not in KNOWN_TO_MPI:
            collective.by_others(self)
        elif self.rank == root:
            self.comm.Reduce(MPI.IN_PLACE, view_of(buffer), op, root)
        else:
            self.comm.Reduce(view_of(buffer), None, op, root)

    def reduce_scatter(self, collective: ReduceScatter) -> None:
        buffer = collective.buffer
        op = OPS[collective.reduction.op]
        if dtype_name(buffer) not in KNOWN_TO_MPI:
            collective.by_others(self)
        else:
            self.comm.Reduce_scatter_block(view_of(buffer), view_of(collective.out), op)

    def start_max(self, buffer: np.ndarray) -> Callable[[], bool]:
        """Begin an all-reduce of `buffer` in place to the greatest values, without waiting.

        Called by: `MessageAgreement`.

        Returns: a function of no arguments: whether all ranks have combined `buffer`. Until it returns True, call it
            again, and do not touch `buffer`.
        """
        return self.comm.Iallreduce(MPI.IN_PLACE, buffer, MPI.MAX).Test

    def broadcast(self, collective: Broadcast) -> None:
        self.comm.Bcast([view_of(collective.buffer), MPI.BYTE], collective.root)

    def shapes_of(self, collective: AllGather) -> np.ndarray:
        """Return an array with each rank's shape in a row, and set `shapes`; exchange shapes if it is None."""
        if collective.shapes is None:
            shape = tuple(collective.buffer.shape) or (1,)
            collective.shapes = _gathered(self.comm, shape)
        return collective.shapes

    def starts_of(self, collective: AllToAll) -> Sequence[Sequence[int]]:
        """Return each rank's `own_starts`, and set `starts`; exchange them if it is None."""
        if collective.starts is None:
            collective.starts = _gathered(self.comm, collective.own_starts).tolist()
        return collective.starts

    def all_gather(self, collective: AllGather) -> list[Array]:
        buffer = collective.buffer
        shapes = self.shapes_of(collective)
        view = view_of(buffer)
        lengths = shapes.prod(axis=1)
        gathered = np.empty(int(lengths.sum()), view.dtype)
        with _elements_of(view.dtype.itemsize) as element:
            sent = [view, view.size, element]
            self.comm.Allgatherv(sent, [gathered, lengths, element])
        ends = np.cumsum(lengths)
        pieces = np.split(gathered, ends[:-1])
        parts: list[Array] = []
        for piece, shape in zip(pieces, shapes, strict=True):
            if not buffer.ndim:
                shape = ()
            parts.append(as_buffer_of(buffer, piece.reshape(shape)))
        return parts

    def all_gather_into(self, collective: AllGatherInto) -> None:
        buffer = collective.buffer
        out = collective.out
        parts_with_own(buffer, out, self.rank, self.size)
        with _elements_of(itemsize(buffer)) as element:
            self.comm.Allgather(MPI.IN_PLACE, [bytes_of(out), num_elements(buffer), element])

    def all_to_all(self, collective: AllToAll) -> None:
        if not collective.row_bytes:
            return
        # mpi4py would take a tuple for a pair of counts and displacements.
        sent = list(collective.sent)
        received = list(collective.received)
        with _elements_of(collective.row_bytes) as element:
            self.comm.Alltoallv(
                [bytes_of(collective.buffer), sent, element],
                [bytes_of(collective.out), received, element],
            )

    moves: ClassVar[Moves] = {
        AllReduce: all_reduce,
        AllReduceByTree: all_reduce_by_tree,
        Reduce: reduce,
        ReduceScatter: reduce_scatter,
        Broadcast: broadcast,
        AllGather: all_gather,
        AllGatherInto: all_gather_into,
        AllToAll: all_to_all,
    }

    @property
    def library(self) -> str:
        """The name and the version of the MPI library."""
        return library_name(MPI.Get_library_version())

    def explain(self, rest: str = "") -> str:
        return f"{self.size} ranks, through MPI: {self.library}"

    def split(self, color: int, key: int = 0) -> MpiTransport:
        return MpiTransport(cast("MPI.Intracomm", self.comm.Split(color, key)))


def _all_reduce_in_slices(
    comm: MPI.Intracomm,
    how: Arithmetic,
    sums: Sequence[np.ndarray],
    held: Sequence[int],
    total: np.ndarray,
    factor: float | None,
) -> None:
    """Combine in slices: every rank gets its slice of all sums, combines it, and sends it to all ranks. Collective.

    Args:
        how: combines the slices, in the order of ranks and of each rank's sums.
        sums: the bytes of each of this rank's sums, all of the same length.
        held: for each rank, how many sums it has.
        total: gets the bytes of the result; it may be one of `sums`.
        factor: multiplies the result; None: the result as it is.
    """
    bounds = share_of(len(total), how.itemsize, comm.size)
    first, end = bounds[comm.rank]
    starts = [start // how.itemsize for start, _ in bounds]
    lengths = [(stop - start) // how.itemsize for start, stop in bounds]
    pieces: dict[tuple[int, int], np.ndarray] = {}  # by rank, and the number of the rank's sum
    with _elements_of(how.itemsize) as element:
        for row in range(max(held)):
            holders = [rank for rank, number in enumerate(held) if row < number]
            memory = sums[-1]
            sent = [0] * comm.size  # unless this rank holds such a sum
            if comm.rank in holders:
                memory = sums[row]
                sent = lengths
            arriving = [0] * comm.size
            for rank in holders:
                arriving[rank] = lengths[comm.rank]
            received = np.empty((len(holders), end - first), np.uint8)
            comm.Alltoallv([memory, sent, starts, element], [received, arriving, element])
            for rank, piece in zip(holders, received, strict=True):
                pieces[rank, row] = piece
        in_order = [how.view(pieces[key]) for key in sorted(pieces)]
        how.combine(in_order, how.view(total[first:end]), factor)
        comm.Allgatherv(MPI.IN_PLACE, [total, lengths, starts, element])


def _gathered(comm: MPI.Intracomm, numbers: Sequence[int]) -> np.ndarray:
    """Return an integer array with the `numbers` of each rank in a row. Collective; all ranks pass equally many."""
    gathered = np.empty((comm.size, len(numbers)), np.int64)
    comm.Allgather(np.asarray(numbers, np.int64), gathered)
    return gathered


@contextlib.contextmanager
def _elements_of(itemsize: int) -> Iterator[MPI.Datatype]:
    """Return a context around messages; it yields an MPI datatype of `itemsize` bytes, and frees it afterwards.

    With it, MPI counts elements without knowing their dtype. A count of bytes could exceed MPI's 32-bit integers.
    """
    element = MPI.BYTE.Create_contiguous(itemsize).Commit()
    try:
        yield element
    finally:
        element.Free()
