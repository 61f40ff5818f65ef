"""The transport that a router lets move a sum."""

from __future__ import annotations

from typing import Any

from mpistrat.communicators.collectives.all_reduce import AllReduce


def chosen_transport(communicator: Any, buffer: Any) -> Any:
    """Return the transport that moves a sum of `buffer` over all ranks. Called by: every rank."""
    transports = communicator.transports
    collective = AllReduce(buffer)
    moves = (transport.choose(collective) for transport in (*transports.preferred, transports.mpi))
    return next(move.__self__ for move in moves if move is not None)
