"""The communicator over the ranks that a cluster resolver speaks of."""

from __future__ import annotations

from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.local import LocalCommunicator


def communicator_of(resolver: ClusterResolver, check: str, what: str) -> Communicator:
    """Our communicator, for a strategy of class `what`, over the ranks that an `MPIClusterResolver` speaks of."""
    comm = getattr(resolver, "comm", None)
    if comm is None:
        return LocalCommunicator()
    from mpistrat.communicators.construction import communicator_for

    return communicator_for(comm, check, f"constructor of {what}")
