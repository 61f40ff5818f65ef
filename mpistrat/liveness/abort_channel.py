"""Tells ranks that wait for their GPU that another rank has failed: no MPI call of theirs would notice it.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from mpi4py import MPI

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
        with contextlib.suppress(
            MPI.Exception
        ):  # of a communicator that has lost a rank: all know that
            self._unsent += [self._comm.isend(text, rank, TAG) for rank in others]

    def received(self) -> str | None:
        """What another rank has sent first; None while there is nothing."""
        if not self._received:
            status = MPI.Status()
            with contextlib.suppress(MPI.Exception):  # of a communicator that has lost a rank
                message = self._comm.improbe(tag=TAG, status=status)
                if message is not None:
                    self._received[status.source] = message.recv()
        return next(iter(self._received.values()), None)

    def settle(self, senders: Iterable[int]) -> None:
        """All ranks know that these have sent: forget it, so that the channel can be used again. Collective."""
        for rank in senders:
            if rank != self._comm.rank and rank not in self._received:
                self._comm.recv(source=rank, tag=TAG)
        self._received.clear()
        MPI.Request.waitall(self._unsent)
        self._unsent.clear()
