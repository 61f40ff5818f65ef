"""The process that becomes an MPI rank. It starts MPI, and tells its parent each step, because MPI may crash or hang.

`python -m mpistrat.tools.doctor.rank_process FD` reads this rank's facts from stdin as JSON. It writes lines of JSON to
the file descriptor FD: {"stage": …, "seconds": …} before each step that may hang, {"library": …}, {"failure": …}. The
last line is {"job": …} on rank 0, and {"rank": …} on every other rank.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from mpistrat.cluster_resolver.mpi import MPIClusterResolver, import_mpi, library_path, start_mpi
from mpistrat.errors import TopologyError
from mpistrat.machine.library_search import visible_mpi_libraries
from mpistrat.machine.network_links import network_links
from mpistrat.settings import start_seconds
from mpistrat.tools.doctor import facts, links, nodes
from mpistrat.topology import Topology

SECONDS_TO_LOAD = 60.0
SECONDS_TO_START = dataclasses.replace(start_seconds, default="60")
SECONDS_TO_GATHER = 120.0  # the first ranks of nodes try their GPUs meanwhile
SECONDS_TO_MEASURE = 30.0
LEVELS = ("single", "funneled", "serialized", "multiple")
LOADING = "loading the MPI library"

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    # End this process when the launcher ends its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=file, flush=True)

    rank = facts.from_json(facts.RankFacts, json.load(sys.stdin))
    tell(stage=LOADING, seconds=SECONDS_TO_LOAD)
    mpi, why_not = import_mpi()
    if mpi is None:
        tried = [line for line in why_not[1:] if "No such file" not in line]
        reason = "; ".join([*why_not[:1], *tried[:3]])
        tell(failure=facts.as_json(facts.JobFailure(LOADING, "library", reason)))
        return
    library = _library(mpi)
    tell(library=facts.as_json(library))
    tell(stage="MPI_Init", seconds=SECONDS_TO_START())
    try:
        start_mpi()
    except TopologyError as error:
        # Only the first line: the other lines of the error are a fix, and the doctor has a better one.
        wrong = str(error).splitlines()[0].rstrip(".")
        tell(failure=facts.as_json(facts.JobFailure("MPI_Init", "topology", wrong)))
        return
    library = dataclasses.replace(library, thread_level=LEVELS[mpi.Query_thread()])
    _meet(mpi, dataclasses.replace(rank, library=library), tell)


def _library(mpi: Any) -> facts.Library:
    finder = importlib.util.find_spec("mpi4py._mpiabi")
    choices = vars(importlib.import_module("mpi4py._mpiabi")) if finder else {}
    return facts.Library(
        path=library_path(),
        version=mpi.Get_library_version().strip("\0 \n"),
        standard=list(mpi.Get_version()),
        candidates=[list(found) for found in visible_mpi_libraries()],
        built_for_one="mpi4py.MPI" not in choices.get("_registry", {}),
    )


def _meet(mpi: Any, rank: facts.RankFacts, tell: Callable[..., None]) -> None:
    """Let all ranks exchange their facts. Tell the parent process the job's facts (rank 0) or this rank's number.

    The first ranks of nodes also try MPI with GPU memory, compare clocks, and measure links. Called by: every rank.
    Args: tell: writes its keyword arguments to the parent as a line of JSON.
    """
    world = mpi.COMM_WORLD
    tell(stage="the first message between all ranks", seconds=SECONDS_TO_GATHER)
    topology = MPIClusterResolver().topology()
    first = topology.local_rank == 0
    gpus = rank.gpus
    if first and gpus:
        gpus = _with_refusal(gpus, rank.driver)
    from mpistrat.communicators.costs.distance import distance_on_node

    cores = dataclasses.replace(rank.cores, distance=distance_on_node(world))
    rank = dataclasses.replace(rank, rank=topology.rank, node=topology.node, gpus=gpus, cores=cores)
    ranks = world.gather(rank)

    leaders = world.Split(int(first), topology.rank)
    clocks = list[facts.Clock]()
    measured = None
    if first and topology.num_nodes > 1:
        clocks, measured = _between_nodes(leaders, topology, tell)
    elif not first:
        tell(stage="waiting for the first ranks of nodes", seconds=SECONDS_TO_GATHER)
    request = world.Ibarrier()
    # A blocking barrier would use the cores that the measuring ranks need.
    while not request.Test():
        time.sleep(0.005)
    if topology.rank:
        tell(rank=topology.rank)
    else:
        tell(job=facts.as_json(facts.JobFacts(ranks, clocks=clocks, links=measured)))


def _with_refusal(gpus: facts.Gpus, driver: facts.Driver) -> facts.Gpus:
    """Try whether MPI takes GPU memory. Returns: `gpus` with `mpi_refusal`; unchanged if torch and CuPy see no GPU."""
    library = "torch" if gpus.torch_gpus else "cupy"
    if library == "cupy" and not (driver.gpus and gpus.cupy):
        return gpus
    from mpistrat.communicators.transports.accelerator.device_memory_proof import reason_against

    return dataclasses.replace(gpus, mpi_refusal=reason_against(library, 0))


def _between_nodes(
    leaders: Any, topology: Topology, tell: Callable[..., None]
) -> tuple[list[facts.Clock], facts.Links]:
    """Compare the clocks of all nodes and measure their links. Called by: the first rank of each node.

    Args: tell: writes a line to the parent process, before each step that may hang.
    Returns: on node 0, the clocks and the links of all nodes; on other nodes an empty list and `Links` without rates.
    """
    tell(stage="comparing the clocks of nodes", seconds=SECONDS_TO_MEASURE)
    clocks = nodes.compare_clocks(leaders)

    def begin(other: int) -> None:
        pair = f"{topology.hosts[topology.node]} and {topology.hosts[other]}"
        tell(stage=f"measuring the link between {pair}", seconds=SECONDS_TO_MEASURE)

    of_nodes = leaders.gather(links.measure(leaders, begin)) or []
    rates = [rate for of_node in of_nodes for rate in of_node]
    speeds = leaders.gather(list(network_links())) or []
    pairs = topology.num_nodes * (topology.num_nodes - 1) // 2
    return clocks, facts.Links(rates, speeds, pairs)


if __name__ == "__main__":
    main()
