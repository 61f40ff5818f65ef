"""Makes the package's communicator over the ranks of a user's mpi4py communicator, and chooses its transports.

mpi4py is imported at the top of this file, and this file on first use, so that `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import cast

from mpi4py import MPI

from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transport import Transport
from mpistrat.communicators.transports.compressed import CompressedTransport
from mpistrat.communicators.transports.hierarchical import SMALLEST, HierarchicalTransport
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.communicators.transports.pipelined import PipelinedTransport
from mpistrat.communicators.transports.ring import RingTransport
from mpistrat.communicators.transports.window import WindowTransport
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.options import CommunicationImplementation
from mpistrat.settings import shared_bytes, trace_folder

_CACHED = MPI.Comm.Create_keyval()


def communicator_for(
    comm: MPI.Intracomm, check: str = "always", what: str = "a communicator"
) -> Communicator:
    """Return the package's communicator over the ranks of the user's `comm`. Collective over `comm`.

    Calls with the same `comm` and `check` return the same object, over one duplicate of `comm`. It is never freed:
    freeing is collective, so no destructor can do it, and MPICH has only 2,046 communicators.

    Args:
        check: "always": ranks compare their calls; "never": they do not.
        what: who needs the communicator, for messages.

    Returns: a `LocalCommunicator` if `comm` has one rank.

    Raises: CollectiveMismatchError on all ranks if `check` differs between them.
    """
    if comm.Get_size() == 1:
        return LocalCommunicator()
    cached = cast("dict[str, Router] | None", comm.Get_attr(_CACHED))
    if cached is None:
        cached = {}
        comm.Set_attr(_CACHED, cached)
    for earlier in list(cached.values())[:1]:  # the same on all ranks: they were made together
        earlier.barrier(label=f"{what}, check={check!r}")
    if check not in cached:
        with start_deadline("the duplication of a communicator", rank=comm.rank, size=comm.size):
            duplicate = comm.Dup()
            checks = duplicate.allgather(check)
            if len(set(checks)) > 1:
                raise CollectiveMismatchError(
                    f"{what} with different check= on the ranks: {checks}, by rank. Pass the same check= on all ranks"
                )
            cached[check] = new_communicator(duplicate, check)
    return cached[check]


def new_communicator(comm: MPI.Intracomm, check: str = "always") -> Router:
    """Return a new communicator of the package over `comm`. Nobody else may use `comm` from now on. Collective.

    If rank 0's environment names a trace folder (MPISTRAT_TRACE), each rank records its calls on its timeline. A rank
    without a timeline begins one in this folder. With MPI_THREAD_MULTIPLE, the job ends from now on when a rank of
    `comm` fails or leaves early.

    Args: check: "always": ranks compare their calls; "never": they do not.
    Raises: TopologyError on all ranks if one of them cannot write to the trace folder.
    """
    # Not all launchers pass the environment on: rank 0's setting holds for all.
    name, folder = comm.bcast((uuid.uuid4().hex, trace_folder()))
    timeline = None
    if folder is not None:
        from mpistrat.trace.of_job import begin

        timeline = begin(comm, folder)
    mpi = MpiTransport(comm)
    transports, watch = transports_of(mpi, name)
    contract = Contract(mpi, name, watch, check, timeline)
    job_end().watch(contract, comm)
    return Router(transports, contract)


def discard(comm: MPI.Intracomm) -> None:
    """Drop the communicators that `communicator_for` keeps for `comm`, with their threads and memory.

    Called by: each survivor alone, when a rank of `comm` has died.
    """
    cached = cast("dict[str, Router] | None", comm.Get_attr(_CACHED))
    if cached is None:
        return
    for communicator in cached.values():
        for implementation in CommunicationImplementation:
            CommunicationThread.discard(communicator.by(implementation))
    comm.Delete_attr(_CACHED)


def transports_of(mpi: MpiTransport, name: str) -> tuple[Transports, CommunicatorWatch]:
    """Return the transports between the ranks of `mpi`, and this rank's watch. Collective.

    The watch is the rank's record, in shared memory, of its calls on the communicator. Its `peers` are None unless all
    ranks are on one node; then shared memory moves large buffers and small calls.

    Args: name: the communicator's name, equal on all ranks.
    """
    watch = job_end().records.watch_of(mpi.comm, name)
    watch.tell_others = job_end().tell_others
    compressed: list[Transport] = []
    if watch.peers is not None:
        window = WindowTransport(mpi, watch, shared_bytes())
        transports = Transports(mpi, [window], window, window.shared_slots())
    else:
        transports = _transports_between_nodes(mpi, watch)
        compressed = [CompressedTransport(Router(Transports(mpi)))]
    # NCCL moves bytes wherever it can, without being asked for.
    forced = {
        CommunicationImplementation.MPI: Transports(mpi, compressed),
        CommunicationImplementation.RING: Transports(mpi, [*compressed, RingTransport(mpi)]),
    }
    return dataclasses.replace(transports, forced=forced, of_part=transports_of), watch


def _transports_between_nodes(mpi: MpiTransport, watch: CommunicatorWatch) -> Transports:
    """Return the transports of ranks on several nodes, or of ranks of one node that cannot share memory. Collective.

    Where nodes have several ranks that see each other's memory, large buffers are combined within each node first.
    """
    comm = mpi.comm
    node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
    sizes = comm.allgather(node.size)
    if max(sizes) == 1:
        node.Free()
        return _transports_in_pieces(mpi, PipelinedTransport(mpi, watch))
    several = node.size < comm.size
    records = job_end().records
    share_memory = several and all(comm.allgather(records.see_each_other(node, watch.record)))
    if not share_memory:
        node.Free()
        return Transports(mpi, [CompressedTransport(Router(Transports(mpi)))])
    senders = min(sizes)
    color = node.rank if node.rank < senders else MPI.UNDEFINED
    peers = cast("MPI.Intracomm", comm.Split(color, comm.rank))
    pipelined = across = None
    if peers != MPI.COMM_NULL:
        between = MpiTransport(peers)
        pipelined = PipelinedTransport(between, watch)
        across = Router(_transports_in_pieces(between, pipelined))
    within = WindowTransport(MpiTransport(node), watch, shared_bytes())
    hierarchical = HierarchicalTransport(mpi, within, pipelined, across, senders)
    compressed = CompressedTransport(Router(Transports(mpi)), SMALLEST)
    return Transports(mpi, [hierarchical, compressed], hierarchical)


def _transports_in_pieces(mpi: MpiTransport, pipelined: PipelinedTransport) -> Transports:
    """Return the transports of ranks on different nodes, one rank on each: large sums go in pieces, by `pipelined`."""
    compressed = CompressedTransport(Router(Transports(mpi, [pipelined])), SMALLEST)
    return Transports(mpi, [compressed, pipelined])
