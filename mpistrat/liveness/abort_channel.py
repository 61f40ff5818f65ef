"""Tells ranks that wait for their GPU that another rank has failed: no MPI call of theirs would notice it.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

from mpi4py import MPI

TAG = 4711  # on a communicator of ours, where no other message has this tag


class AbortChannel:
    """Between the ranks of `comm`, which nobody else uses."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._unsent: list[MPI.Request] = []

    def send(self, text: str) -> None:
        """Tell all other ranks that this one has failed, and how. Not collective."""
        others = (rank for rank in range(self._comm.size) if rank != self._comm.rank)
        self._unsent += [self._comm.isend(text, rank, TAG) for rank in others]

    def received(self) -> str | None:
        """What another rank has sent; None while there is nothing."""
        message = self._comm.improbe(tag=TAG)
        return None if message is None else message.recv()
