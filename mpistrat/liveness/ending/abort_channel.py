"""Tells ranks that wait for their GPU that another rank has failed, because they make no MPI call that would notice it.

This file imports mpi4py, so it is imported only on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from mpi4py import MPI

from mpistrat.liveness import deadlines
from mpistrat.liveness.bounded_waits import soon

TAG = 4711  # no other message on the communicator has this tag


class AbortChannel:
    """Sends the failure of a rank to all other ranks of `comm`, by point-to-point messages.

    Called by: groups of GPU libraries (NCCL and others). They abort their kernels when a text arrives. Several threads
    of a rank may use the channel at the same time; this needs MPI_THREAD_MULTIPLE.

    Args: comm: a communicator on which no other code uses `TAG`.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._unsent: list[MPI.Request] = []
        self._received: dict[int, str] = {}  # by rank

    def send(self, text: str) -> None:
        """Tell all other ranks that this rank has failed; `text` describes its error. Not collective; does not wait."""
        others = sorted({*range(self._comm.size)} - {self._comm.rank})
        # MPI raises on a communicator that has lost a rank. Nothing is sent then, because all ranks know of the loss.
        with contextlib.suppress(MPI.Exception):
            self._unsent += [self._comm.isend(text, rank, TAG) for rank in others]

    def tell(self, text: str) -> None:
        """Send `text` unless this rank has sent a text before. Then wait for a text of each other rank, at most 0.75 s.

        Called by: a rank that fails, and each rank that hears of a failure. So a rank learns that all ranks have heard
        of it, and all abort at the same time. Not collective.
        """
        if not self._unsent:
            self.send(text)
        soon(
            self._has_heard_all,
            deadlines.RANK_WAITS_FOR_ABORTS_OF_OTHERS,
            sleeps_at_most=deadlines.RANK_SLEEPS_WATCHING_ABORTS,
        )

    def _has_heard_all(self) -> bool:
        self._receive()
        return len(self._received) == self._comm.size - 1

    def received(self) -> str | None:
        """Return the first text that arrived from another rank; None if no text has arrived. Does not wait."""
        if not self._received:
            self._receive()
        texts = [*self._received.values()]  # a copy: another thread may receive more
        return next(iter(texts), None)

    def _receive(self) -> None:
        status = MPI.Status()
        with contextlib.suppress(MPI.Exception):  # the communicator has lost a rank
            message = self._comm.improbe(tag=TAG, status=status)
            if message is not None:
                self._received[status.source] = message.recv()

    def settle(self, senders: Iterable[int]) -> None:
        """Receive the texts that are still under way, and forget all texts, so that the channel can be used again.

        Collective. Called by: all ranks after the start of a GPU library; ranks tell failures of the start by `send`.

        Args: senders: the ranks that have sent a text, the same on all ranks.
        """
        for rank in senders:
            if rank != self._comm.rank and rank not in self._received:
                self._comm.recv(source=rank, tag=TAG)
        self._received.clear()
        MPI.Request.waitall(self._unsent)
        self._unsent.clear()
