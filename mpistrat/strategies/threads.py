"""Compute threads: the ranks of a node share its cores."""

from __future__ import annotations

import os
import sys

from mpistrat.communicators import Communicator
from mpistrat.errors import CollectiveMismatchError, counted
from mpistrat.machine.cpu_share import fixed_threads, intra_op_threads, users_threads
from mpistrat.machine.notices import tell
from mpistrat.topology import Topology

announced = False


def share_cores(
    communicator: Communicator, topology: Topology, deterministic: bool = False
) -> int | None:
    """Set the number of torch's intra-op threads to this rank's share of the cores that it may run on.

    Torch by itself starts a thread for every core of the node on each rank that is not bound to cores. The program's
    own setting (OMP_NUM_THREADS, …) stays, and a single rank keeps torch's choice.

    Called by: every rank of `communicator`, in the constructor of a strategy.
    Args:
        deterministic: whether the number of threads must not depend on the number of ranks: it is then OMP_NUM_THREADS,
            or 1.
    Returns: the number of threads, equal on all ranks, with `deterministic`; else None.
    Raises: CollectiveMismatchError, on all ranks, if `deterministic` or its number of threads differs between ranks.
    """
    global announced
    fixed = fixed_threads() if deterministic else None
    affinity = os.sched_getaffinity(0)
    affinities = communicator.all_gather_object(
        (topology.node, sorted(affinity), fixed), label="CPU affinity"
    )
    _check_equal([threads for _, _, threads in affinities])
    if fixed is not None:
        _set_threads(fixed)
        return fixed
    if communicator.size == 1 or users_threads():  # other ranks may have none
        return None
    local = [set(cpus) for node, cpus, _ in affinities if node == topology.node]
    threads = intra_op_threads(affinity, local)
    _set_threads(threads)
    if communicator.rank == 0 and not announced:
        announced = True
        of_rank = counted(threads, "compute thread")
        ranks = counted(len(local), "rank")
        share = "shares" if len(local) == 1 else "share"
        cores = len(set().union(*local))
        tell(
            f"{of_rank} per rank ({ranks} of this node {share} {cores} cores); set OMP_NUM_THREADS "
            "to choose",
            "INFO",
        )
    return None


def _set_threads(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    else:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _check_equal(fixed: list[int | None]) -> None:
    if len(set(fixed)) > 1:
        parts = []
        for rank, threads in enumerate(fixed):
            text = f"{threads} threads"
            if threads is None:
                text = "not deterministic"
            parts.append(f"rank {rank}: {text}")
        by_rank = ", ".join(parts)
        raise CollectiveMismatchError(
            "deterministic=True must be the same on all ranks, with the same number of compute threads on each "
            f"(OMP_NUM_THREADS, or 1 where it is not set); got {by_rank}"
        )
