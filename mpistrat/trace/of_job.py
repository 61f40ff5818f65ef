"""Starts the timelines (records of events) of a job's ranks, compares clocks, and collects the files at the job's end.

This file imports mpi4py at its top. So it is imported only if MPISTRAT_TRACE is set.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket

from mpi4py import MPI

from mpistrat.errors import TopologyError
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.machine.private_files import create
from mpistrat.trace import clocks, of_process
from mpistrat.trace.timeline import Timeline, header_of, part_of

_BYTES_PER_MESSAGE = 1 << 22

_comms: list[MPI.Intracomm] = []


def begin(comm: MPI.Intracomm, folder: str) -> Timeline:
    """Return this process's timeline, for a new communicator over the ranks of `comm`. Collective over `comm`.

    A process has one timeline: later calls return it, even with another folder. Each call also compares the clocks of
    the nodes of `comm`.

    Called by: `communicators.construction`, if MPISTRAT_TRACE is set on rank 0.
    Args:
        comm: a communicator that nothing else uses during the call; the trace uses it again at the job's end.
        folder: the folder for the parts: a file of each rank.
    Raises: TopologyError on all ranks if one of them cannot write its part there.
    """
    world = MPI.COMM_WORLD
    error = None
    try:
        timeline = of_process.begin(folder, world.rank, world.size)
    except OSError as failed:
        error = f"rank {world.rank} on {socket.gethostname()}: {failed}"
    errors = [failure for failure in comm.allgather(error) if failure is not None]
    if errors:
        raise TopologyError(
            f"MPISTRAT_TRACE={folder!r}: {len(errors)} of {comm.size} ranks cannot write their part of the trace "
            f"there ({errors[0]}); name a folder that every rank can make and write to, or unset it"
        )
    if not _comms:
        of_process.ends_with_job = True
        job_end().finish_with(timeline, lambda: _complete(timeline))
    compare_clocks(comm, timeline)
    _comms.append(comm)
    return timeline


def _complete(timeline: Timeline) -> None:
    """Close the timeline, collect the ranks' parts in rank 0's folder, and merge them there.

    Communicators that lost a rank are left out.

    Called by: `job_end`, on all ranks, when no rank records events any more.
    """
    whole = [comm for comm in _comms if not job_end().losses.has_lost(comm)]
    for comm in whole:
        compare_clocks(comm, timeline)
    timeline.close()
    for comm in whole:
        gather_parts(comm, timeline)
    if timeline.rank == 0:
        of_process.merge_parts(timeline)


def compare_clocks(comm: MPI.Intracomm, timeline: Timeline) -> None:
    """Compare the clock of each other node with the clock of rank 0 of `comm`. Collective over `comm`.

    The first rank of a node does so, by 20 round trips of a short message, and records the result on its `timeline`.
    """
    names = comm.allgather(timeline.clock)
    others = [names.index(name) for name in dict.fromkeys(names)][1:]
    if comm.rank == 0:
        for rank in others:
            clocks.answer(comm, rank, timeline.now)
    elif comm.rank in others:
        found = clocks.compare_with(comm, 0, timeline.now)
        timeline.add_comparison(names[0], found.at, found.ahead, found.error)


def gather_parts(comm: MPI.Intracomm, timeline: Timeline) -> None:
    """Send rank 0 the parts that it does not see in its folder, because their nodes do not share that folder.

    Collective over `comm`. Does nothing unless rank 0 of `comm` is rank 0 of the job. A rank removes its part when it
    has sent it.
    """
    parts = comm.gather((timeline.rank, timeline.header)) or []
    unseen = [
        source
        for source, (rank, header) in enumerate(parts)
        if timeline.rank == 0 and header_of(part_of(timeline.folder, rank)) != header
    ]
    for source in comm.bcast(unseen):
        if comm.rank == source:
            _send_part(comm, timeline)
        elif comm.rank == 0:
            _receive_part(comm, source, part_of(timeline.folder, parts[source][0]))


def _send_part(comm: MPI.Intracomm, timeline: Timeline) -> None:
    with contextlib.suppress(OSError):
        with open(timeline.path, "rb") as file:
            while data := file.read(_BYTES_PER_MESSAGE):
                comm.send(data, 0)
        os.unlink(timeline.path)
    comm.send(b"", 0)


def _receive_part(comm: MPI.Intracomm, rank: int, path: str) -> None:
    """Write the part that `rank` sends into the file `path`. If it cannot be written, receive it all the same.

    The file gets its name at the end. By then the sender has removed its own file, in case both share the folder.
    """
    messages = iter(lambda: comm.recv(source=rank), b"")
    with contextlib.suppress(OSError), create(f"{path}.received", binary=True) as file:
        file.writelines(messages)
    collections.deque(messages, 0)  # receive the rest, even if the file could not be written
    with contextlib.suppress(OSError):
        os.replace(f"{path}.received", path)
