"""Host buffers over MPI.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, dtype_name, is_torch
from mpistrat.cluster_resolver.launcher import library_name
from mpistrat.communicators.arithmetic import (
    KNOWN_TO_MPI,
    SUMMED_AS_FLOAT32,
    arithmetic_of,
)
from mpistrat.communicators.host_views import as_buffer_of, bytes_of, view_of
from mpistrat.communicators.node.blocks import share_of
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.transports.transport import Transport
from mpistrat.communicators.tree_sum import tree_sum_of

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
# Bytes of short floats from which on two exchanges of them are cheaper than one reduction of float32.
_SMALLEST_IN_SLICES = 1 << 15
# Of the sums that all ranks hold: up to here, a second message costs more than what it saves.
_WHOLE = 1 << 15


class MpiTransport(Transport):
    """MPI's own messages, which take every call. The last transport of a router, and what the others stand on.

    Args:
        comm: used by nobody else.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.thread_multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def choose(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Transport:
        return self

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> None:
        if tree is not None:
            self._all_reduce_by_tree(buffer, tree, reduction.scale)
            return
        op, scale = _OPS[reduction.op], reduction.scale
        target = buffer if out is None else out
        name = dtype_name(buffer)
        if name.startswith(SUMMED_AS_FLOAT32):
            if buffer.nbytes >= _SMALLEST_IN_SLICES:
                self._all_reduce_in_slices(buffer, reduction, target)
                return
            wide = buffer.float() if is_torch(buffer) else buffer.astype(np.float32)
            self.comm.Allreduce(MPI.IN_PLACE, view_of(wide), op)
            target[...] = wide if scale is None else wide * scale  # rounded once
            return
        if is_torch(buffer) and name not in KNOWN_TO_MPI:
            raise TypeError(f"MPI cannot reduce {name}; convert it to float32 first")
        if out is None:
            self.comm.Allreduce(MPI.IN_PLACE, view_of(buffer), op)
        else:
            self.comm.Allreduce(view_of(buffer), view_of(out), op)
        if scale is not None:
            target *= scale

    def _all_reduce_in_slices(self, buffer: Array, reduction: Reduction, out: Array) -> None:
        """Every rank gets its slice of all buffers, combines it in float32, and hands it round: short floats travel."""
        how = arithmetic_of(buffer, reduction.op)
        assert how is not None
        memory, total = bytes_of(buffer), bytes_of(out)
        bounds = share_of(len(memory), how.itemsize, self.size)
        first, end = bounds[self.rank]
        lengths = [(stop - start) // how.itemsize for start, stop in bounds]
        pieces = np.empty((self.size, end - first), np.uint8)
        with _elements_of(how.itemsize) as element:
            mine = lengths[self.rank]
            self.comm.Alltoallv([memory, lengths, element], [pieces, mine, element])
            slice_ = how.view(total[first:end])
            how.combine([how.view(piece) for piece in pieces], slice_, reduction.scale)
            self.comm.Allgatherv(MPI.IN_PLACE, [total, lengths, element])

    def _all_reduce_by_tree(self, sums: Array, tree: ReductionTree, scale: float | None) -> None:
        """Every rank adds up one slice of all sums, and the slices are handed round; small sums each adds up whole."""
        how = tree_sum_of(sums, tree)
        mine = bytes_of(sums).reshape(len(tree.held[self.rank]), -1)
        nbytes = mine.shape[1]
        held = [len(parts) for parts in tree.held]
        if not nbytes:
            return
        if nbytes * self.size <= _WHOLE:
            gathered = np.empty((sum(held), nbytes), np.uint8)
            if tree.one_each:
                self.comm.Allgather(mine, gathered)
            else:
                self.comm.Allgatherv(mine, [gathered, [number * nbytes for number in held]])
            how.combine([how.view(piece) for piece in gathered], how.view(mine[0]), scale)
            return
        bounds = share_of(nbytes, how.itemsize, self.size)
        first, end = bounds[self.rank]
        starts = [start // how.itemsize for start, _ in bounds]
        lengths = [(stop - start) // how.itemsize for start, stop in bounds]
        pieces: dict[tuple[int, int], Any] = {}  # by rank and number of its sum
        with _elements_of(how.itemsize) as element:
            for row in range(max(held)):
                theirs = [rank for rank in range(self.size) if row < held[rank]]
                here = lengths if self.rank in theirs else [0] * self.size
                there = [lengths[self.rank] * (rank in theirs) for rank in range(self.size)]
                received = np.empty((len(theirs), end - first), np.uint8)
                self.comm.Alltoallv(
                    [mine[min(row, len(mine) - 1)], here, starts, element],
                    [received, there, element],
                )
                pieces |= {
                    (rank, row): how.view(r) for rank, r in zip(theirs, received, strict=True)
                }
            in_order = [pieces[key] for key in sorted(pieces)]
            how.combine(in_order, how.view(mine[0][first:end]), scale)
            self.comm.Allgatherv(MPI.IN_PLACE, [mine[0], lengths, starts, element])

    def reduce(self, buffer: Array, root: int, reduction: Reduction) -> None:
        op = _OPS[reduction.op]
        if dtype_name(buffer) not in KNOWN_TO_MPI:
            super().reduce(buffer, root, reduction)
        elif self.rank == root:
            self.comm.Reduce(MPI.IN_PLACE, view_of(buffer), op, root)
        else:
            self.comm.Reduce(view_of(buffer), None, op, root)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction) -> None:
        if dtype_name(buffer) not in KNOWN_TO_MPI:
            super().reduce_scatter(buffer, out, reduction)
        else:
            self.comm.Reduce_scatter_block(view_of(buffer), view_of(out), _OPS[reduction.op])

    def start_all_reduce(self, buffer: np.ndarray, op: str = "sum") -> Callable[[], bool]:
        """Begin to combine `buffer` in place; what is returned says, and must be asked, whether it is done."""
        return self.comm.Iallreduce(MPI.IN_PLACE, buffer, _OPS[op]).Test

    def broadcast(self, buffer: Array, root: int) -> None:
        self.comm.Bcast([view_of(buffer), MPI.BYTE], root)

    def shapes_of(self, buffer: Array) -> np.ndarray:
        """Every rank's, a row each; that of a scalar is (1,)."""
        shapes = np.empty((self.size, max(1, buffer.ndim)), np.int64)
        self.comm.Allgather(np.asarray(tuple(buffer.shape) or (1,), np.int64), shapes)
        return shapes

    def all_gather(self, buffer: Array, shapes: np.ndarray | None = None) -> list[Array]:
        """`shapes`: as of `shapes_of`, where they are known."""
        if shapes is None:
            shapes = self.shapes_of(buffer)
        view = view_of(buffer)
        lengths = shapes.prod(axis=1)
        gathered = np.empty(int(lengths.sum()), view.dtype)
        with _elements_of(view.dtype.itemsize) as element:
            self.comm.Allgatherv([view, view.size, element], [gathered, lengths, element])
        parts: list[Array] = []
        for piece, shape in zip(np.split(gathered, np.cumsum(lengths)[:-1]), shapes, strict=True):
            part = piece.reshape(shape if buffer.ndim else ())
            parts.append(as_buffer_of(buffer, part))
        return parts

    @property
    def library(self) -> str:
        """MPI's name and version."""
        return library_name(MPI.Get_library_version())

    def explain(self, rest: str = "") -> str:
        return f"{self.size} ranks, through MPI: {self.library}"

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.comm.bcast(value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.comm.allgather(value)

    def barrier(self) -> None:
        self.comm.Barrier()

    def split(self, color: int, key: int = 0) -> MpiTransport:
        return MpiTransport(cast("MPI.Intracomm", self.comm.Split(color, key)))


@contextlib.contextmanager
def _elements_of(itemsize: int) -> Iterator[MPI.Datatype]:
    """What to count in: MPI need not know the dtype, and bytes would be too many for its integers."""
    element = MPI.BYTE.Create_contiguous(itemsize).Commit()
    try:
        yield element
    finally:
        element.Free()
