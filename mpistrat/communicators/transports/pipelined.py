"""Messages of large sums that leave the core to the program: MPI's blocking calls spin until the last byte is there.

Between nodes a message waits for the network, and a thread that spins meanwhile takes the core from a backward() that
could use it: of 1 Gbit/s, half of the core where ranks and their communication threads share it. So a buffer goes in
pieces, several of them on their way, and the thread sleeps between looks at them.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array
from mpistrat.communicators.arithmetic import Arithmetic, arithmetic_of
from mpistrat.communicators.costs.measurement import (
    SECONDS_BETWEEN_NODES,
    Costs,
    costs_of,
    from_bytes,
)
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.blocks import share_of
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.router import Router
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.transport import Transport
from mpistrat.liveness.waiting import wait_until
from mpistrat.liveness.watch import CommunicatorWatch

# Below, pieces gain nothing.
SMALLEST = 1 << 16
# Bytes that go to one rank at a time, while there are few; of each of _ON_THEIR_WAY pieces of the buffer.
TO_EACH = 1 << 18
_MOST_RANKS = 16
_ON_THEIR_WAY = 4
# By how much pieces may be dearer than MPI's own: a core that is left to the program is worth as much.
_CLEARLY = 1.1
IN_PIECES, MPI_ALONE = "in pieces, asleep meanwhile", "MPI"
_TAG = 2

_Requests = Sequence[MPI.Request]


class PipelinedTransport(Transport):
    """Large sums of ranks on as many nodes.

    Args:
        mpi: over the same ranks.
        watch: where a stall is told.

    Attributes:
        costs: of both ways; known from the first large sum on.
        smallest: bytes from which on a sum goes in pieces, by these costs.
        left: messages of a sum that this rank left in its middle, into memory that MPI may still write to.
    """

    def __init__(self, mpi: MpiTransport, watch: CommunicatorWatch) -> None:
        self._mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self._watch = watch
        self._torn: BaseException | None = None  # what this rank left a sum for
        self.left: list[MPI.Request] = []
        self.costs: Costs | None = None
        self.smallest = float(SMALLEST)

    def choose(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Transport | None:
        if call != "all_reduce" or tree is not None or buffer.nbytes < SMALLEST:
            return None
        if arithmetic_of(buffer, reduction.op) is None:
            return None
        self.settle()
        return self if buffer.nbytes >= self.smallest else None

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> None:
        how = arithmetic_of(buffer, reduction.op)
        assert how is not None
        target = bytes_of(buffer if out is None else out)
        self._all_reduce(how, bytes_of(buffer), target, reduction.scale)

    def settle(self, abreast: int = 1) -> None:
        """Measure which way is the cheaper, unless that is known. Collective.

        Args:
            abreast: how many communicators such as this one, over the same nodes, do so at the same time.
        """
        if self.costs is None:
            how = arithmetic_of(np.empty(0, np.float32), "sum")
            assert how is not None

            def in_pieces(buffer: np.ndarray) -> None:
                memory = bytes_of(buffer)
                self._all_reduce(how, memory, memory, None)

            in_pieces(np.zeros(SMALLEST // 4, np.float32))  # else it alone pays for connections
            self.costs = costs_of(
                {IN_PIECES: in_pieces, MPI_ALONE: lambda zeros: self._mpi.all_reduce(zeros, SUM)},
                Router([self._mpi]),
                self._mpi.library,
                [1] * self.size,
                abreast=abreast,
                asleep=[IN_PIECES],
                seconds=SECONDS_BETWEEN_NODES,
            )
            self.smallest = self.costs.cheaper_from(IN_PIECES, MPI_ALONE, SMALLEST, _CLEARLY)

    def _all_reduce(
        self, how: Arithmetic, source: np.ndarray, target: np.ndarray, scale: float | None
    ) -> None:
        """Of each piece, every rank gets its part of all buffers, combines it, and sends it to all.

        All ranks send and receive in the same order, so that messages need no numbers. What is left of a sum that a
        rank leaves in its middle would be taken for the next one's.
        Raises: RuntimeError after such a one.
        """
        if self._torn is not None:
            raise RuntimeError(
                "this rank cannot combine large values with other nodes any more: it left a sum in its middle, for "
                f"{type(self._torn).__name__}, and others may wait for its part. Save what you need and end the program"
            ) from self._torn
        length = TO_EACH * min(self.size, _MOST_RANKS)
        pieces = [
            slice(first, min(first + length, len(source)))
            for first in range(0, len(source), length)
        ]
        arriving: collections.deque[tuple[_Requests, list[np.ndarray], slice]] = collections.deque()
        leaving: collections.deque[_Requests] = collections.deque()
        following = iter(pieces)
        try:
            for piece in itertools.islice(following, _ON_THEIR_WAY):
                arriving.append((*self._scatter(how, source[piece]), piece))
            while arriving:
                requests, parts, piece = arriving[0]
                self._wait(requests)
                arriving.popleft()
                total = target[piece]
                bounds = share_of(len(total), how.itemsize, self.size)
                mine = total[slice(*bounds[self.rank])]
                how.combine([how.view(part) for part in parts], how.view(mine), scale)
                leaving.append(self._gather(total, bounds))
                if len(leaving) > _ON_THEIR_WAY:
                    self._wait(leaving[0])
                    leaving.popleft()
                for piece in itertools.islice(following, 1):
                    arriving.append((*self._scatter(how, source[piece]), piece))
            for requests in leaving:
                self._wait(requests)
        except BaseException as error:
            self._torn = error
            for requests in itertools.chain((one[0] for one in arriving), leaving):
                self.left += requests
            raise

    def _scatter(self, how: Arithmetic, source: np.ndarray) -> tuple[_Requests, list[np.ndarray]]:
        """Begin to send every rank its part of `source`; and this rank's part of everyone's, once it is there."""
        bounds = share_of(len(source), how.itemsize, self.size)
        mine = source[slice(*bounds[self.rank])]
        parts = [mine if peer == self.rank else np.empty_like(mine) for peer in range(self.size)]
        return self._exchange([source[slice(*cut)] for cut in bounds], parts), parts

    def _gather(self, total: np.ndarray, bounds: Sequence[tuple[int, int]]) -> _Requests:
        """Begin to give everyone this rank's part of `total`, and to get theirs."""
        parts = [total[slice(*cut)] for cut in bounds]
        return self._exchange([parts[self.rank]] * self.size, parts)

    def _exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> _Requests:
        """By rank. The next rank comes first, so that not all send to the same one."""
        comm = self._mpi.comm
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        requests = [comm.Irecv([received[peer], MPI.BYTE], peer, _TAG) for peer in others]
        return requests + [comm.Isend([sent[peer], MPI.BYTE], peer, _TAG) for peer in others]

    def _wait(self, requests: _Requests) -> None:
        wait_until(functools.partial(MPI.Request.Testall, requests), self._watch, yields=False)

    def explain(self, rest: str) -> str:
        told = f"{self.size} ranks on as many nodes, sums {IN_PIECES}, "
        if self.costs is None:
            told += "once something large has been combined"
        else:
            told += f"{from_bytes(self.smallest)}; of S bytes an all-reduce takes\n{self.costs.explain()}"
        return f"{told}\n{rest}"
