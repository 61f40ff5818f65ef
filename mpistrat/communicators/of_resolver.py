"""The communicator of a strategy, over the ranks of its cluster resolver."""

from __future__ import annotations

from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.local import LocalCommunicator


def communicator_of(resolver: ClusterResolver, check: str, what: str) -> Communicator:
    """Return the communicator over the ranks of a strategy's cluster resolver. Collective over them.

    Args:
        check: "always": ranks compare their calls; "never": they do not.
        what: the name of the strategy's class or of the tool, for messages.

    Returns: a `LocalCommunicator` (of one rank) if `resolver` has no MPI communicator, or one of one rank.
    """
    comm = getattr(resolver, "comm", None)
    if comm is None:
        return LocalCommunicator()
    from mpistrat.communicators.construction import communicator_for

    return communicator_for(comm, check, f"constructor of {what}")
