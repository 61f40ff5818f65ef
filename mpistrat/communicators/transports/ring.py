"""All ranks in a ring: each sends to the next and receives from the one before, a part of the buffer at a time.

The bandwidth-optimal all-reduce that tf.distribute's RING means, too (P. Patarasuk, X. Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", Journal of Parallel and Distributed Computing 69, 2009): each rank
sends 2 (p - 1) / p of the bytes in 2 (p - 1) steps. MPI has that algorithm among its own; this one is for programs that
ask for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_torch
from mpistrat.communicators.arithmetic import SUMMED_AS_FLOAT32, arithmetic_of
from mpistrat.communicators.host_views import as_buffer_of, bytes_of, view_of
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.transport import Transport

_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_TAG = 1


# What goes round; broadcasts, and reductions to one rank, are MPI's.
_CALLS = frozenset(["all_reduce", "reduce_scatter", "all_gather"])


class RingTransport(Transport):
    """Numbers by way of all ranks in turn.

    Args:
        mpi: over the same ranks.
    """

    def __init__(self, mpi: MpiTransport) -> None:
        self._mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size

    def choose(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Transport | None:
        if call not in _CALLS or tree is not None:
            return None
        return self if call == "all_gather" or arithmetic_of(buffer, reduction.op) else None

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> None:
        target = buffer if out is None else out
        bytes_of(target)  # is contiguous
        scale = reduction.scale
        if dtype_name(buffer).startswith(SUMMED_AS_FLOAT32):
            wide = buffer.float() if is_torch(buffer) else buffer.astype(np.float32)
            self._around(view_of(wide), reduction.op)
            target[...] = wide if scale is None else wide * scale  # rounded once
            return
        if out is not None:
            out[...] = buffer
        self._around(view_of(target), reduction.op)
        if scale is not None:
            target *= scale

    def _around(self, array: np.ndarray, op: str) -> None:
        flat = array.reshape(-1)
        parts = self._parts(flat)
        self._combine(parts, op)
        self._hand_round(parts)

    def _parts(self, flat: np.ndarray) -> list[np.ndarray]:
        """A view for each rank, as equal as they can be; of few elements, some have none."""
        cuts = [len(flat) * rank // self.size for rank in range(self.size + 1)]
        return [flat[first:end] for first, end in itertools.pairwise(cuts)]

    def _combine(self, parts: Sequence[np.ndarray], op: str) -> None:
        """Rank r's part r is combined; the others are somewhere on their way."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        arrived = np.empty(max(map(len, parts)), parts[0].dtype)
        with np.errstate(all="ignore"):
            for step in range(1, self.size):
                sent, mine = parts[(self.rank - step) % self.size], parts[before - step]
                received = arrived[: len(mine)]
                self._exchange(sent, after, received, before)
                _COMBINE[op](mine, received, out=mine)

    def _hand_round(self, parts: Sequence[np.ndarray]) -> None:
        """Every rank gets every part from the one before, once rank r has part r."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for step in range(self.size - 1):
            sent, received = parts[(self.rank - step) % self.size], parts[before - step]
            self._exchange(sent, after, received, before)

    def _exchange(self, sent: np.ndarray, after: int, received: np.ndarray, before: int) -> None:
        """Both at once: that all ranks send first cannot keep them from receiving."""
        self._mpi.comm.Sendrecv(sent, after, _TAG, received, before, _TAG)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction) -> None:
        if dtype_name(buffer).startswith(SUMMED_AS_FLOAT32):
            super().reduce_scatter(buffer, out, reduction)
        else:
            parts = self._parts(view_of(buffer).reshape(-1).copy())
            self._combine(parts, reduction.op)
            bytes_of(out)[:] = parts[self.rank].view(np.uint8)

    def all_gather(self, buffer: Array) -> list[Array]:
        shapes = self._mpi.shapes_of(buffer)
        view = view_of(buffer)
        parts = [np.empty(tuple(shape) if buffer.ndim else (), view.dtype) for shape in shapes]
        parts[self.rank][...] = view
        self._hand_round([bytes_of(part) for part in parts])
        return [as_buffer_of(buffer, part) for part in parts]

    def explain(self, rest: str) -> str:
        but_for = "broadcasts and what is reduced to one rank"
        return f"{self.size} ranks in a ring, but for {but_for}\n{rest}"
