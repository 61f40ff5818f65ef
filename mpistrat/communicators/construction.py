"""Our communicator over the ranks of the user's: what moves its bytes, and what watches over it.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import uuid
from typing import cast

from mpi4py import MPI

from mpistrat.cluster_resolver.shared_memory_limit import shared_bytes
from mpistrat.cluster_resolver.start_deadline import start_deadline
from mpistrat.cluster_resolver.trace_folder import trace_folder
from mpistrat.communicators import job_end
from mpistrat.communicators.checked import CheckedCommunicator
from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.hierarchical import HierarchicalCommunicator
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.mpi import MpiCommunicator
from mpistrat.communicators.node import see_each_other, station_of
from mpistrat.communicators.patient import PatientCommunicator
from mpistrat.communicators.shared_window import SharedWindowCommunicator
from mpistrat.communicators.station import Station
from mpistrat.errors import CollectiveMismatchError
from mpistrat.options import CommunicationImplementation

_CACHED = MPI.Comm.Create_keyval()


def communicator_for(
    comm: MPI.Intracomm, check: str = "always", what: str = "a communicator"
) -> Communicator:
    """Our communicator over the ranks of the user's `comm`, for `what`; collective over it.

    There is one duplicate per user communicator and `check`, cached on it as an attribute and never freed: MPICH
    ends after 2,046 of them, and freeing is collective, which a destructor cannot be.
    Raises: CollectiveMismatchError on all ranks when `check` differs among them.
    """
    if comm.Get_size() == 1:
        return LocalCommunicator()
    cached = cast("dict[str, CheckedCommunicator] | None", comm.Get_attr(_CACHED))
    if cached is None:
        cached = {}
        comm.Set_attr(_CACHED, cached)
    for earlier in list(cached.values())[:1]:  # the same on all ranks: they were made together
        earlier.barrier(label=f"{what}, check={check!r}")
    if check not in cached:
        with start_deadline("the duplication of a communicator"):
            duplicate = comm.Dup()
            checks = duplicate.allgather(check)
            if len(set(checks)) > 1:
                raise CollectiveMismatchError(
                    f"{what} with different check= on the ranks: {checks}, by rank"
                )
            # Not all launchers hand on the environment: rank 0's setting holds for all.
            name, folder = duplicate.bcast((uuid.uuid4().hex, trace_folder()))
            inner, station = _by_node(MpiCommunicator(duplicate), name)
            if folder is None:
                cached[check] = CheckedCommunicator(inner, name, station, check)
            else:
                from mpistrat.communicators.trace_of_job import traced

                cached[check] = traced(duplicate, folder, inner, name, station, check)
        job_end.watch(cached[check], duplicate)
    return cached[check]


def discard(comm: MPI.Intracomm) -> None:
    """Let go of our communicators over the ranks of `comm`, one of which has failed, and of the memory they share."""
    cached = cast("dict[str, CheckedCommunicator] | None", comm.Get_attr(_CACHED))
    for communicator in (cached or {}).values():
        for implementation in CommunicationImplementation:
            CommunicationThread.discard(communicator.by(implementation))
    if cached is not None:
        comm.Delete_attr(_CACHED)


def _by_node(flat: MpiCommunicator, name: str) -> tuple[Communicator, Station]:
    """What moves bytes between the ranks of `flat`, by shared memory within nodes if there is some, and its station.

    Collective.
    """
    comm = flat.comm
    station = station_of(comm, name, _by_node)
    if station.peers is not None:
        return SharedWindowCommunicator(flat, station, shared_bytes()), station
    node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
    sizes = comm.allgather(node.size)
    if max(sizes) == 1:
        node.Free()
        return PatientCommunicator(flat, station), station
    several = node.size < comm.size
    if not several or not all(comm.allgather(see_each_other(node, station.record))):
        node.Free()
        return flat, station
    carriers = min(sizes)
    color = node.rank if node.rank < carriers else MPI.UNDEFINED
    across = cast("MPI.Intracomm", comm.Split(color, comm.rank))
    hierarchical = HierarchicalCommunicator(
        flat,
        SharedWindowCommunicator(MpiCommunicator(node), station, shared_bytes()),
        None if across == MPI.COMM_NULL else PatientCommunicator(MpiCommunicator(across), station),
        carriers,
    )
    return hierarchical, station
