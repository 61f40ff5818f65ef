"""Compute threads: the ranks of a node share its cores."""

from __future__ import annotations

import os
import sys

from mpistrat.cluster_resolver.cpu_share import intra_op_threads, user_set_threads
from mpistrat.communicators import Communicator
from mpistrat.topology import Topology

_announced = False


def share_cores(communicator: Communicator, topology: Topology) -> None:
    """Set torch's intra-op threads to this rank's share of the cores it may run on.

    Every rank of `communicator` calls it. Ranks that are not bound would otherwise each start a thread
    for every core of the node. What the user set (OMP_NUM_THREADS, …) stays; a single rank keeps
    torch's own choice.
    """
    global _announced
    if communicator.size == 1:
        return
    mine = os.sched_getaffinity(0)
    everyone = communicator.all_gather_object((topology.node, sorted(mine)), label="CPU affinity")
    if user_set_threads():  # on this rank; others may differ
        return
    local = [set(cpus) for node, cpus in everyone if node == topology.node]
    threads = intra_op_threads(mine, local)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    else:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if communicator.rank == 0 and not _announced:
        _announced = True
        print(
            f"mpistrat: {threads} compute thread{'s' * (threads > 1)} per rank ({len(local)} ranks of "
            f"this node share {len(set().union(*local))} cores); set OMP_NUM_THREADS to choose",
            file=sys.stderr,
            flush=True,
        )
