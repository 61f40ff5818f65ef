"""Large all-reduces between nodes, in pieces; the rank sleeps while it waits for the network.

MPI's blocking calls spin while they wait, and take the core from a backward() that could use it: with 1 Gbit/s, half of
the core that a rank shares with its communication thread. So this transport sends a buffer in pieces, several at a
time, by nonblocking messages, and its thread sleeps between the tests whether they have arrived.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from mpi4py import MPI

from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.costs.measurement import NOT_MEASURED, costs_of
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.blocks import Unbroken
from mpistrat.communicators.reduction.arithmetic import Arithmetic, share_of
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transport import Moves, Transport
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until

# In bytes. A smaller sum gains nothing by pieces.
SMALLEST = 1 << 16
# A piece has TO_EACH bytes for each rank, for at most _MOST_RANKS ranks; _ON_THEIR_WAY pieces are sent at a time.
TO_EACH = 1 << 18
_MOST_RANKS = 16
_ON_THEIR_WAY = 4
# Pieces are taken even if they need up to this many times as long as MPI, because they leave the core to the program.
_CLEARLY = 1.1
IN_PIECES = "in pieces, asleep meanwhile"
MPI_ALONE = "MPI"
_TAG = 2

_Requests = Sequence[MPI.Request]
_Arrival = tuple[_Requests, list[np.ndarray], slice]  # the last is the piece of the buffer


class PipelinedTransport(Transport):
    """Moves all-reduces of 64 KB or more over ranks on different nodes, one on each, if MPI is not clearly faster.

    Args:
        mpi: the MPI transport of this communicator's ranks.
        watch: the rank's record of the calls that it waits in; the rank waits for messages with its timeout.

    Attributes:
        costs: the costs of pieces and of MPI; measured at the first large buffer, NOT_MEASURED before.
        smallest: buffers of at least so many bytes go in pieces, according to `costs`.
        left: MPI requests of all-reduces that this process left because of an error. They live as long as the process,
            because MPI may still write to their memory.
    """

    left: ClassVar[list[MPI.Request]] = []

    def __init__(self, mpi: MpiTransport, watch: CommunicatorWatch) -> None:
        self._mpi = mpi
        self._watch = watch
        self.rank = mpi.rank
        self.size = mpi.size
        # If this rank left a sum, the other ranks would take its messages of the next sum for messages of the first.
        self._unbroken = Unbroken("combine large values with other nodes", "a sum")
        self.costs = NOT_MEASURED
        self.smallest = float(SMALLEST)

    def takes(self, collective: AllReduce) -> bool:
        nbytes = collective.buffer.nbytes
        if nbytes < SMALLEST or not collective.can_slice():
            return False
        self.settle()
        return nbytes >= self.smallest

    def settle(self, abreast: int = 1) -> None:
        """Measure `costs`, and compute `smallest`, unless an earlier call has done so. Collective.

        Called by: `takes`, and `HierarchicalTransport` when it measures its routes.

        Args:
            abreast: number of such communicators over the same nodes that measure at the same time.
        """
        if self.costs is not NOT_MEASURED:
            return
        # The first sum opens connections; without it, the first route alone would pay for them.
        self.add_up(np.zeros(SMALLEST // 4, np.float32))
        self.costs = costs_of(
            {IN_PIECES: self.add_up, MPI_ALONE: self._mpi.add_up},
            Router(Transports(self._mpi)),
            self._mpi.library,
            [1] * self.size,
            abreast=abreast,
            asleep=[IN_PIECES],
        )
        self.smallest = self.costs.cheaper_from(IN_PIECES, MPI_ALONE, SMALLEST, _CLEARLY)

    def all_reduce(self, collective: AllReduce) -> None:
        """All-reduce in pieces: each rank gets its part of a piece from all ranks, combines it, and sends it to all.

        All ranks send and receive in the same order, so all messages have the same tag.
        """
        how = collective.how()
        source = bytes_of(collective.buffer)
        target = bytes_of(collective.target)
        length = TO_EACH * min(self.size, _MOST_RANKS)
        firsts = range(0, len(source), length)
        waiting = collections.deque(slice(first, first + length) for first in firsts)
        arriving: collections.deque[_Arrival] = collections.deque()
        leaving: collections.deque[_Requests] = collections.deque()
        with self._unbroken:
            try:
                while waiting or arriving:
                    while waiting and len(arriving) < _ON_THEIR_WAY:
                        piece = waiting.popleft()
                        arriving.append((*self._scatter(how, source[piece]), piece))
                    requests, parts, piece = arriving[0]
                    self._wait(requests)
                    arriving.popleft()
                    total = target[piece]
                    bounds = share_of(len(total), how.itemsize, self.size)
                    part = how.view(total[slice(*bounds[self.rank])])
                    views = [how.view(arrived) for arrived in parts]
                    how.combine(views, part, collective.reduction.scale)
                    leaving.append(self._gather(total, bounds))
                    if len(leaving) > _ON_THEIR_WAY:
                        self._wait(leaving[0])
                        leaving.popleft()
                for requests in leaving:
                    self._wait(requests)
            except BaseException:
                for requests in (*(arrival[0] for arrival in arriving), *leaving):
                    self.left.extend(requests)
                raise

    moves: ClassVar[Moves] = {AllReduce: all_reduce}

    def _scatter(self, how: Arithmetic, source: np.ndarray) -> tuple[_Requests, list[np.ndarray]]:
        """Begin to send every rank its part of `source`, and to receive this rank's part of all ranks' `source`.

        Returns: the MPI requests, and the parts in rank order. The parts have their values when the requests are
            complete.
        """
        bounds = share_of(len(source), how.itemsize, self.size)
        sent = [source[slice(*cut)] for cut in bounds]
        kept = sent[self.rank]
        parts = [kept if peer == self.rank else np.empty_like(kept) for peer in range(self.size)]
        requests = self._exchange(sent, parts)
        return requests, parts

    def _gather(self, total: np.ndarray, bounds: Sequence[tuple[int, int]]) -> _Requests:
        """Begin to send this rank's part of `total` to all ranks, and to receive the other parts into `total`."""
        parts = [total[slice(*cut)] for cut in bounds]
        return self._exchange([parts[self.rank]] * self.size, parts)

    def _exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> _Requests:
        """Begin to send an array to each other rank, and to receive one from each. Returns: the MPI requests.

        Both sequences have an entry for each rank, in rank order; this rank's own is not used. The first message goes
        to the next rank, so that not all ranks send to the same rank.
        """
        comm = self._mpi.comm
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        requests = []
        for peer in others:
            requests.append(comm.Irecv([received[peer], MPI.BYTE], peer, _TAG))
        for peer in others:
            requests.append(comm.Isend([sent[peer], MPI.BYTE], peer, _TAG))
        return requests

    def _wait(self, requests: _Requests) -> None:
        wait_until(lambda: MPI.Request.Testall(requests), self._watch, yields=False)

    def explain(self, rest: str) -> str:
        sums = f"{self.size} ranks on as many nodes, sums {IN_PIECES}"
        return f"{sums}, {self.costs.explain_from(self.smallest)}\n{rest}"
