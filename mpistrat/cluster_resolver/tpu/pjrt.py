"""The environment variables that tell PJRT a rank's part of a TPU slice.

They are libtpu's variables. Their values are the same as in torch_xla 2.9, when it starts one process per chip
(`torch_xla._internal.tpu.configure_topology`, `torch_xla._internal.pjrt.initialize_multiprocess`).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from mpistrat.cluster_resolver.tpu.slice import TPUSlice, bounds_text
from mpistrat.errors import NotFoundError, TopologyError
from mpistrat.settings import Environment
from mpistrat.topology import Topology

DEVICE = "PJRT_DEVICE"  # "TPU"
LOCAL_RANK = "PJRT_LOCAL_PROCESS_RANK"  # "3": this process's number on its host
LOCAL_SIZE = "PJRT_LOCAL_PROCESS_COUNT"  # "4": processes of each host
TASK_ID = "CLOUD_TPU_TASK_ID"  # "7": this process's number in the slice, by worker id, then by number on its host
PROCESS_BOUNDS = "TPU_PROCESS_BOUNDS"  # "2,2,2": the box of all processes
# "1,1,1": the box of each process's chips
CHIPS_PER_PROCESS_BOUNDS = "TPU_CHIPS_PER_PROCESS_BOUNDS"
VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"  # "3"; "0,1,2,3"
PROCESS_ADDRESSES = "TPU_PROCESS_ADDRESSES"  # "10.0.0.1:8476,10.0.0.1:8477,…": all, by task id
PROCESS_PORT = "TPU_PROCESS_PORT"  # "8479": this process's port
BASE_PORT = 8476  # port of a host's first process, as in torch_xla; the next ones count on


_FORWARDED = (
    "each host needs its own TPU_WORKER_ID, so do not let mpirun copy one host's value to all hosts (-x, -genv), or "
    "unset it and TPU_ACCELERATOR_TYPE to have each host ask its metadata server"
)


def pjrt_environment(topology: Topology, slices: Sequence[TPUSlice]) -> dict[str, str]:
    """Return the environment variables of PJRT (XLA's device interface) for the rank `topology.rank`.

    The caller sets them before the process first uses an XLA device. With one rank per host, the rank gets all chips of
    its host. With one rank per chip, the rank gets the chip of its local rank (for v7x: half of a chip). Hosts are
    ordered by their worker ids, so MPI's nodes may have any order. Each rank needs a free port on its host: 8476 + its
    local rank.

    Args:
        topology: MPI's topology; its nodes are the hosts of the slice.
        slices: each rank's description of its slice, in rank order, from `slices_of_ranks`.
    Raises:
        ValueError: on all ranks, if there is neither one rank per host nor one rank per chip, or a host of the
            slice has no rank.
        TopologyError: on all ranks, if the ranks describe different slices, or two hosts have the same worker id.
    """
    _check_alike(topology, slices)
    tpu = slices[topology.rank]
    ranks_per_host = _ranks_per_host(topology, tpu)
    ports = [BASE_PORT + local_rank for local_rank in range(ranks_per_host)]
    hosts = tpu.addresses if tpu.num_hosts > 1 else ("localhost",)
    local_rank = topology.local_rank
    if ranks_per_host == 1:
        process_bounds: tuple[int, ...] = tpu.host_bounds
        chips_per_process: tuple[int, ...] = tpu.chips_per_host_bounds
        visible = range(tpu.units_per_host)
    else:
        process_bounds = tuple(map(operator.mul, tpu.host_bounds, tpu.chips_per_host_bounds))
        if tpu.units_per_host > tpu.chips_per_host:
            process_bounds += (tpu.units_per_host // tpu.chips_per_host,)
        chips_per_process = (1, 1, 1)
        visible = range(local_rank, local_rank + 1)
    return {
        DEVICE: "TPU",
        LOCAL_RANK: str(local_rank),
        LOCAL_SIZE: str(ranks_per_host),
        TASK_ID: str(tpu.worker_id * ranks_per_host + local_rank),
        PROCESS_BOUNDS: bounds_text(process_bounds),
        CHIPS_PER_PROCESS_BOUNDS: bounds_text(chips_per_process),
        VISIBLE_CHIPS: ",".join(str(chip) for chip in visible),
        PROCESS_ADDRESSES: ",".join(f"{host}:{port}" for host in hosts for port in ports),
        PROCESS_PORT: str(ports[local_rank]),
    }


def slices_of_ranks(
    describe: Callable[[], TPUSlice | None], all_gather_object: Callable[[Any], list[Any]]
) -> list[TPUSlice]:
    """Return each rank's description of its TPU slice, in rank order; [] if `describe` returns None on all ranks.

    Called by: every rank. Communicates once.
    Args:
        describe: returns this rank's slice, or None: `TPUClusterResolver.slice`.
        all_gather_object: takes this rank's object, and returns the objects of all ranks, in rank order.
    Raises: on all ranks, NotFoundError or ValueError, with the text from the first rank where `describe` raises it;
        TopologyError if only some ranks have a slice.
    """
    answer: TPUSlice | NotFoundError | ValueError | None
    try:
        answer = describe()
    except NotFoundError as error:
        answer = NotFoundError(str(error))
    except ValueError as error:
        answer = ValueError(str(error))
    answers: list[TPUSlice | NotFoundError | ValueError | None] = all_gather_object(answer)
    for rank, answer in enumerate(answers):
        if isinstance(answer, Exception):
            raise type(answer)(f"rank {rank}: {answer}")
    found = [answer for answer in answers if isinstance(answer, TPUSlice)]
    if found and len(found) < len(answers):
        raise TopologyError(
            f"rank {answers.index(None)} was given TPUClusterResolver('local'), and other ranks hosts of "
            f"{_shown(found[0])}: all ranks need the same"
        )
    return found


def set_pjrt_environment(
    variables: Mapping[str, str], environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set PJRT's variables in `environ`, and overwrite existing values.

    GKE uses two of these names for the bounds of hosts, and torch_xla would keep GKE's values. The caller has called
    `TPUClusterResolver.slice()` before, because `slice()` needs GKE's values.
    """
    environ.update(variables)


def asked_device(environ: Environment = os.environ) -> str:
    """Return the kind of XLA device that PJRT_DEVICE asks for.

    Returns: "CPU" or "TPU"; "TPU" if the variable is not set or empty.
    Raises: ValueError if PJRT_DEVICE has another value.
    """
    asked = environ.get(DEVICE, "") or "TPU"
    if asked not in ("TPU", "CPU"):
        raise ValueError(f"PJRT_DEVICE must be TPU or CPU, got {asked!r}")
    return asked


def _check_alike(topology: Topology, slices: Sequence[TPUSlice]) -> None:
    if len(slices) != topology.size:
        raise ValueError(
            f"{len(slices)} descriptions of the slice for {topology.size} ranks: give every rank's"
        )
    for rank, described in enumerate(slices):
        if replace(described, worker_id=0) != replace(slices[0], worker_id=0):
            raise TopologyError(
                f"rank 0 is on a host of {_shown(slices[0])}, and rank {rank} of {_shown(described)}: all ranks of a "
                "job need hosts of one slice, with the same variables or metadata on each host"
            )
    first_rank: dict[int, int] = {}  # by worker id
    worker_of_node: dict[int, int] = {}
    for rank, (node, described) in enumerate(zip(topology.node_of_rank, slices, strict=True)):
        worker = described.worker_id
        other = first_rank.setdefault(worker, rank)
        if worker_of_node.setdefault(node, worker) != worker:
            ranks = topology.ranks_on_node(node)
            workers = [slices[r].worker_id for r in ranks]
            raise TopologyError(
                f"the ranks {ranks} run on one node, but their worker ids are {workers}: {_FORWARDED}"
            )
        if topology.node_of_rank[other] != node:
            raise TopologyError(
                f"the ranks {other} and {rank} run on different nodes, and both have the worker id {worker}: "
                f"{_FORWARDED}"
            )


def _ranks_per_host(topology: Topology, tpu: TPUSlice) -> int:
    nodes = topology.num_nodes
    counts = [len(topology.ranks_on_node(node)) for node in range(nodes)]
    kind = tpu.accelerator_type
    hosts = tpu.num_hosts
    units = tpu.units_per_host
    fix = f"start {hosts} ranks, one per host"
    if units > 1:
        unit = "half of a chip"
        if units == tpu.chips_per_host:
            unit = "chip"
        fix += f", or {hosts * units}, one per {unit}"
    if nodes != hosts:
        raise ValueError(
            f"{topology.size} ranks run on {nodes} nodes, but a {kind} has {hosts} hosts: {fix}, on all of them"
        )
    if set(counts) not in ({1}, {units}):
        raise ValueError(
            f"{topology.size} ranks run as {counts} on the {hosts} hosts of a {kind} with "
            f"{tpu.chips_per_host} chips each: {fix}"
        )
    return counts[0]


def _shown(described: TPUSlice) -> str:
    hosts = bounds_text(described.host_bounds)
    chips = bounds_text(described.chips_per_host_bounds)
    return (
        f"a {described.accelerator_type} {described.name} (hosts {hosts}, chips of each {chips}, addresses "
        f"{list(described.addresses)!r:.200})"
    )
