"""The TPU devices of a job: found, and used for the first time, by all ranks together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

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
from mpistrat.communicators.of_resolver import communicator_of
from mpistrat.errors import NotFoundError, TopologyError
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.topology import Topology
from mpistrat.xla.runtime import Runtime, check_versions
from mpistrat.xla.topology.topology import TpuTopology

if TYPE_CHECKING:
    from mpi4py import MPI

Coordinates = tuple[int, int, int, int]


class TpuSystem(NamedTuple):
    """
    Attributes:
        runtime: of this process.
        topology: tasks are ranks; the devices of each are numbered as XLA does in its process.
        cores_of_ranks: the numbers of each rank's devices among all that XLA knows there.
    """

    runtime: Runtime
    topology: TpuTopology
    cores_of_ranks: list[list[int]]


def initialize_tpu_system(
    cluster_resolver: TPUClusterResolver | None = None, *, comm: MPI.Intracomm | None = None
) -> TpuTopology:
    """Join the ranks' TPU devices, before anything uses one, and tell how they lie. TPUStrategy does it, too.

    Called by: every rank of the job (or of `comm`).
    Args:
        cluster_resolver: the slice; None is what this host belongs to.
        comm: the mpi4py communicator of the ranks that take part; None is all.
    Returns: the mesh of all devices. Tasks are ranks. With PJRT_DEVICE=CPU, whose devices have no place in a mesh, the
        first coordinate is the rank, the second the device.
    Raises:
        NotFoundError: this is no TPU host. ValueError, TopologyError: ranks and hosts do not fit. ImportError:
        torch_xla is missing, or of another version than torch. RuntimeError: XLA finds no device, or another rank
        could not start. One of them on all ranks.
    """
    over_mpi = MPIClusterResolver(comm)
    communicator = communicator_of(over_mpi, "always", "initialize_tpu_system")
    return start_system(cluster_resolver, over_mpi.topology(), communicator).topology


def shutdown_tpu_system() -> None:
    """Wait until the devices have done what they were given. They are free for other processes once this one ends.

    Called by: any rank.
    """
    if xla.is_started():
        xla.start().wait()


def start_system(
    resolver: TPUClusterResolver | None, topology: Topology, communicator: Communicator
) -> TpuSystem:
    """The work of `initialize_tpu_system`, for the ranks of `communicator`, of which MPI says `topology`."""
    # PJRT reads its environment once, at the first use of a device: the environment is complete before. The device that
    # the program asks for is read before torch_xla is imported, because the import sets PJRT_DEVICE.
    asked, devices = "", None
    error: Exception | None = None
    try:
        asked = asked_device()
        check_versions()
    except (ImportError, ValueError) as raised:
        error = raised
    communicator.raise_any(error, "cannot start XLA")
    if asked == "TPU" and not xla.is_started():
        # How many processes there are, where, and which chips are this one's.
        gather = functools.partial(communicator.all_gather_object, label="TPU slices")
        slices = slices_of_ranks((resolver or TPUClusterResolver()).slice, gather)
        if slices:  # of "local" there are none: PJRT finds the chips of this host itself
            set_pjrt_environment(pjrt_environment(topology, slices))
    with start_deadline("XLA's start", rank=topology.rank, size=topology.size):
        try:
            runtime = xla.start()
            _check_devices(runtime, asked, topology)
            devices = runtime.kind, runtime.own_devices(), runtime.coordinates()
        except Exception as raised:
            error = raised
        communicator.raise_any(error, "could not start XLA")
    devices_of_ranks = communicator.all_gather_object(devices, label="XLA's devices")
    kinds, cores, places = zip(*devices_of_ranks, strict=True)
    for what, values in (("kinds", kinds), ("numbers", [*map(len, cores)])):
        if len(set(values)) > 1:
            raise TopologyError(
                f"the ranks have different {what} of XLA devices: {[*values]}, by rank; start them on equal hosts, "
                "with the same PJRT_DEVICE"
            )
    return TpuSystem(runtime, mesh_of(places, len(cores[0])), [*cores])


def _check_devices(runtime: Runtime, asked: str, topology: Topology) -> None:
    """Raises: where they are not those that were asked for."""
    if runtime.kind != asked:
        raise NotFoundError(
            f"no {asked} found: XLA has {runtime.num_devices} {runtime.kind} devices here. See that libtpu is there "
            "(pip install 'mpistrat[tpu]') and no other process holds the chips; to try a program without a TPU, set "
            "PJRT_DEVICE=CPU"
        )
    if runtime.was_in_use and runtime.kind == "TPU" and topology.size > 1:
        raise RuntimeError(
            f"rank {topology.rank}: the program has used an XLA device before the strategy was made, when PJRT did not "
            "know of the other ranks; make the TPUStrategy, or call tpu.initialize_tpu_system(), first"
        )


def mesh_of(places: tuple[list[Coordinates] | None, ...], per_task: int) -> TpuTopology:
    """The mesh of the devices at `places`, by rank; where they have none, rank by device."""
    if None in places:
        by_number = np.argwhere(np.ones((len(places), per_task, 1, 1)))
        devices = by_number.reshape(len(places), per_task, -1)
    else:
        devices = np.array(places)
    low, high = devices.min((0, 1)), devices.max((0, 1))
    return TpuTopology(mesh_shape=high - low + 1, device_coordinates=devices - low)
