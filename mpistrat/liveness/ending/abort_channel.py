"""Tells ranks that wait for their GPU that another rank has failed: no MPI call of theirs would notice it.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from mpi4py import MPI

from mpistrat.liveness import deadlines

TAG = 4711  # on a communicator of ours, where no other message has this tag


class AbortChannel:
    """Between the ranks of `comm`, which nobody else uses. Threads may receive while another sends, as MPI allows."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._unsent: list[MPI.Request] = []
        self._received: dict[int, str] = {}  # by rank

    def send(self, text: str) -> None:
        """Tell all other ranks that this one has failed, and how. Not collective."""
        others = (rank for rank in range(self._comm.size) if rank != self._comm.rank)
        # A communicator that has lost a rank raises: all know of that failure.
        with contextlib.suppress(MPI.Exception):
            self._unsent += [self._comm.isend(text, rank, TAG) for rank in others]

    def tell(self, text: str) -> None:
        """Send, unless this rank has sent something; return when all other ranks have sent something, or after a while.

        A rank that hears of a failure tells it, too: each rank then knows that all have heard. Not collective.
        """
        if not self._unsent:
            self.send(text)
        until = time.monotonic() + deadlines.RANK_WAITS_FOR_ABORTS_OF_OTHERS
        while len(self._received) < self._comm.size - 1 and time.monotonic() < until:
            self._receive()
            time.sleep(deadlines.RANK_SLEEPS_WATCHING_ABORTS)

    def received(self) -> str | None:
        """What another rank has sent first; None while there is nothing."""
        if not self._received:
            self._receive()
        texts = [*self._received.values()]  # a copy: another thread may receive more
        return next(iter(texts), None)

    def _receive(self) -> None:
        status = MPI.Status()
        with contextlib.suppress(MPI.Exception):  # of a communicator that has lost a rank
            message = self._comm.improbe(tag=TAG, status=status)
            if message is not None:
                self._received[status.source] = message.recv()

    def settle(self, senders: Iterable[int]) -> None:
        """All ranks know that these have sent: forget it, so that the channel can be used again. Collective."""
        for rank in senders:
            if rank != self._comm.rank and rank not in self._received:
                self._comm.recv(source=rank, tag=TAG)
        self._received.clear()
        MPI.Request.waitall(self._unsent)
        self._unsent.clear()
