"""All ranks in a ring: each sends a part of the buffer to the next rank, and receives a part from the previous rank.

It is the bandwidth-optimal all-reduce that tf.distribute calls RING (P. Patarasuk, X. Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", Journal of Parallel and Distributed Computing 69, 2009): each rank
of p ranks sends 2 (p - 1) / p of the bytes in 2 (p - 1) steps. MPI may choose this algorithm itself; this transport is
for programs that ask for `CommunicationImplementation.RING`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mpistrat.arrays import Array, dtype_name
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.host_views import (
    as_buffer_of,
    bytes_of,
    parts_with_own,
    room_for,
    view_of,
)
from mpistrat.communicators.reduction.arithmetic import (
    SUMMED_AS_FLOAT32,
    arithmetic_of,
    share_of,
)
from mpistrat.communicators.reduction.as_float32 import reduce_in_place
from mpistrat.communicators.transport import Moves, Transport
from mpistrat.communicators.transports.mpi import MpiTransport

_TAG = 1


class RingTransport(Transport):
    """Moves all-reduces, reduce-scatters and all-gathers from rank to rank, in a ring; MPI moves other calls.

    Args:
        mpi: the MPI transport of this communicator's ranks.
    """

    def __init__(self, mpi: MpiTransport) -> None:
        self._mpi = mpi
        self.rank = mpi.rank
        self.size = mpi.size

    def takes(self, collective: Collective) -> bool:
        return collective.can_slice()

    def all_reduce(self, collective: AllReduce) -> None:
        bytes_of(collective.target)  # raises ValueError unless it is C-contiguous
        op = collective.reduction.op

        def around(values: Array) -> None:
            parts = self._parts(view_of(values).reshape(-1))
            self._combine(parts, op)
            self._hand_round(parts)

        reduce_in_place(collective.buffer, collective.out, collective.reduction.scale, around)

    def _parts(self, flat: np.ndarray) -> list[np.ndarray]:
        """Cut `flat` into a view for each rank, in rank order; lengths differ by at most one element, and may be 0."""
        bounds = share_of(len(flat), 1, self.size)
        return [flat[first:end] for first, end in bounds]

    def _combine(self, parts: Sequence[np.ndarray], op: str) -> None:
        """Combine part r of all ranks into rank r's `parts[r]`; a rank's other parts get sums of some ranks only."""
        longest = max(len(part) for part in parts)
        arrived = np.empty(longest, parts[0].dtype)
        how = arithmetic_of(arrived.dtype, op)
        for step in range(1, self.size):
            part = parts[self.rank - step - 1]
            received = arrived[: len(part)]
            self._exchange(parts[self.rank - step], received)
            how.combine((part, received), part, None)

    def _hand_round(self, parts: Sequence[np.ndarray]) -> None:
        """Send every part round the ring, until each rank has all parts. At first rank r has only part r."""
        for step in range(self.size - 1):
            place = self.rank - step
            self._exchange(parts[place], parts[place - 1])

    def _exchange(self, sent: np.ndarray, received: np.ndarray) -> None:
        """Send `sent` to the next rank, and at the same time receive `received` from the previous rank."""
        before = (self.rank - 1) % self.size
        after = (self.rank + 1) % self.size
        self._mpi.comm.Sendrecv(sent, after, _TAG, received, before, _TAG)

    def reduce_scatter(self, collective: ReduceScatter) -> None:
        if dtype_name(collective.buffer).startswith(SUMMED_AS_FLOAT32):
            collective.by_others(self)
        else:
            parts = self._parts(view_of(collective.buffer).reshape(-1).copy())
            self._combine(parts, collective.reduction.op)
            bytes_of(collective.out)[:] = parts[self.rank].view(np.uint8)

    def all_gather(self, collective: AllGather) -> list[Array]:
        buffer = collective.buffer
        parts = room_for(buffer, self._mpi.shapes_of(collective))
        parts[self.rank][...] = view_of(buffer)
        self._hand_round([bytes_of(part) for part in parts])
        return [as_buffer_of(buffer, part) for part in parts]

    def all_gather_into(self, collective: AllGatherInto) -> None:
        parts = parts_with_own(collective.buffer, collective.out, self.rank, self.size)
        self._hand_round(parts)

    moves: ClassVar[Moves] = {
        AllReduce: all_reduce,
        ReduceScatter: reduce_scatter,
        AllGather: all_gather,
        AllGatherInto: all_gather_into,
    }

    def explain(self, rest: str) -> str:
        but_for = "broadcasts, exchanges of rows and reductions to one rank"
        return f"{self.size} ranks in a ring, except for {but_for}\n{rest}"
