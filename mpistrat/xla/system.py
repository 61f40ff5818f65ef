"""Finds and starts the TPU devices of a job, on all ranks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat import xla
from mpistrat.cluster_resolver import MPIClusterResolver, TPUClusterResolver
from mpistrat.cluster_resolver.tpu.pjrt import (
    asked_device,
    pjrt_environment,
    set_pjrt_environment,
    slices_of_ranks,
)
from mpistrat.communicators import Communicator
from mpistrat.communicators.communicator import RaisingOnAll
from mpistrat.communicators.of_resolver import communicator_of
from mpistrat.errors import NotFoundError, TopologyError
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.topology import Topology
from mpistrat.xla.runtime import INSTALL, Runtime, check_versions
from mpistrat.xla.topology.topology import TpuTopology

if TYPE_CHECKING:
    from mpi4py import MPI

Coordinates = tuple[int, int, int, int]


class TpuSystem(NamedTuple):
    """The started TPU devices of a job.

    Attributes:
        runtime: the XLA runtime of this process.
        topology: the mesh of all devices. Its task t is rank t, and the task's devices are in XLA's order in that rank.
        cores_of_ranks: for each rank, the numbers of the rank's devices among all devices that XLA knows on that rank.
    """

    runtime: Runtime
    topology: TpuTopology
    cores_of_ranks: list[list[int]]


def initialize_tpu_system(
    cluster_resolver: TPUClusterResolver | None = None, *, comm: MPI.Intracomm | None = None
) -> TpuTopology:
    """Join the TPU devices of all ranks, and return their mesh. `TPUStrategy` does this by itself.

    Called by: every rank of the job (or of `comm`), before anything uses an XLA device.
    Args:
        cluster_resolver: names the slice (TPU chips that are linked); None is the slice of this host.
        comm: the mpi4py communicator of the ranks that take part; None is all ranks.
    Returns: the mesh of all devices; its task t is rank t. With PJRT_DEVICE=CPU, the first coordinate of a device is
        the rank, the second is the device's number on the rank, and the others are 0.
    Raises: on all ranks, if one rank has the error:
        NotFoundError: this is no TPU host, or XLA has another kind of device.
        ValueError, TopologyError: the ranks do not fit the hosts, or have different devices.
        ImportError: torch_xla is missing or is built against another torch version.
        RuntimeError: XLA finds no device, or another rank could not start.

    Example, on a TPU::

        topology = ms.tpu.initialize_tpu_system(ms.cluster_resolver.TPUClusterResolver())
        assignment = ms.tpu.DeviceAssignment.build(topology, num_replicas=topology.num_tasks)
        strategy = ms.TPUStrategy(experimental_device_assignment=assignment)
    """
    over_mpi = MPIClusterResolver(comm)
    communicator = communicator_of(over_mpi, "always", "initialize_tpu_system")
    return start_system(cluster_resolver, over_mpi.topology(), communicator).topology


def shutdown_tpu_system() -> None:
    """Wait until this process's TPU devices have finished their work. Do nothing if XLA was not started.

    The devices become free for other processes when this process ends.
    Called by: any rank.

    Example, on a TPU::

        ms.tpu.initialize_tpu_system()
        ms.tpu.shutdown_tpu_system()
    """
    if xla.is_started():
        xla.start().wait()


def start_system(
    resolver: TPUClusterResolver | None, topology: Topology, communicator: Communicator
) -> TpuSystem:
    """Start XLA on all ranks of `communicator`, and return the devices that XLA has found on each rank.

    Called by: `initialize_tpu_system` and `TPUStrategy`, on every rank. A process starts XLA only once; later calls
    return the same devices.
    Args:
        resolver: names the slice (TPU chips that are linked); None is the slice of this host.
        topology: the ranks of `communicator` and their nodes.
    Raises: on all ranks, NotFoundError if a host has no device of the kind in PJRT_DEVICE; ValueError or TopologyError
        if the ranks do not fit the hosts; ImportError without a fitting torch_xla; RuntimeError if a rank cannot start
        XLA.
    """
    # PJRT reads its environment variables once, when a device is used first, so they are set before. PJRT_DEVICE is
    # read before torch_xla is imported, because the import sets PJRT_DEVICE.
    with RaisingOnAll(communicator, "cannot start XLA"):
        asked = asked_device()
        check_versions()
    if asked == "TPU" and not xla.is_started():
        # PJRT needs variables for the number of processes, their addresses, and the chips of this process.
        resolver = resolver or TPUClusterResolver()

        def gather(value: Any) -> list[Any]:
            return communicator.all_gather_object(value, label="TPU slices")

        slices = slices_of_ranks(resolver.slice, gather)
        if slices:  # empty for TPUClusterResolver("local"): PJRT finds this host's chips itself
            set_pjrt_environment(pjrt_environment(topology, slices))
    deadline = start_deadline("XLA's start", rank=topology.rank, size=topology.size)
    with deadline, RaisingOnAll(communicator, "could not start XLA"):
        runtime = xla.start()
        _check_devices(runtime, asked, topology)
        devices = runtime.kind, runtime.own_devices(), runtime.coordinates()
    devices_of_ranks = communicator.all_gather_object(devices, label="XLA's devices")
    kinds, cores, places = zip(*devices_of_ranks, strict=True)
    numbers = [len(of_rank) for of_rank in cores]
    for what, values in (("kinds", kinds), ("numbers", numbers)):
        if len(set(values)) > 1:
            raise TopologyError(
                f"the ranks have different {what} of XLA devices: {[*values]}, by rank; start them on equal hosts, "
                "with the same PJRT_DEVICE"
            )
    return TpuSystem(runtime, mesh_of(places, len(cores[0])), [*cores])


def _check_devices(runtime: Runtime, asked: str, topology: Topology) -> None:
    """Check the devices that XLA has found on this rank.

    Args: asked: the kind of device that PJRT_DEVICE asks for, "TPU" or "CPU".
    Raises: NotFoundError if XLA has devices of another kind; RuntimeError if the job has several ranks on TPUs, and the
        program used a device before the ranks knew of each other.
    """
    if runtime.kind != asked:
        raise NotFoundError(
            f"no {asked} found: XLA has {runtime.num_devices} {runtime.kind} devices here. See that libtpu is there "
            f"({INSTALL}) and no other process holds the chips; to try a program without a TPU, set "
            "PJRT_DEVICE=CPU"
        )
    if runtime.was_in_use and runtime.kind == "TPU" and topology.size > 1:
        raise RuntimeError(
            f"rank {topology.rank}: the program has used an XLA device before the strategy was made, when PJRT did not "
            "know of the other ranks; make the TPUStrategy, or call tpu.initialize_tpu_system(), first"
        )


def mesh_of(places: tuple[list[Coordinates] | None, ...], per_task: int) -> TpuTopology:
    """Return the mesh of the devices of all ranks; its lowest coordinate along each axis is 0.

    Args:
        places: for each rank, (x, y, z, core on the chip) of each of the rank's devices; None if the devices have no
            coordinates. If one rank has None, all devices get the coordinates (rank, number on the rank, 0, 0).
        per_task: number of devices of each rank.
    """
    if None in places:
        by_number = np.argwhere(np.ones((len(places), per_task, 1, 1)))
        devices: np.ndarray = by_number.reshape(len(places), per_task, -1)
    else:
        devices = np.array(places)
    low = devices.min((0, 1))
    high = devices.max((0, 1))
    return TpuTopology(mesh_shape=high - low + 1, device_coordinates=devices - low)
