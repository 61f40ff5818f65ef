"""The timelines of a job's ranks: begun together, their clocks compared, and put together at the job's end.

mpi4py is imported at the top of this file, and this file only where MPISTRAT_TRACE is set.
"""

from __future__ import annotations

import collections
import contextlib
import functools
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
    """The timeline in `folder` for a communicator over the ranks of `comm`, which is ours.

    Collective over `comm`. A process has one timeline: the first folder is that of all its communicators.
    Raises: TopologyError on all ranks when one cannot write there.
    """
    world, error = MPI.COMM_WORLD, None
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
        job_end().finish_with(timeline, functools.partial(_complete, timeline))
    compare_clocks(comm, timeline)
    _comms.append(comm)
    return timeline


def _complete(timeline: Timeline) -> None:
    """All ranks have come to their ends, and none records anything any more."""
    whole = [comm for comm in _comms if not job_end().losses.has_lost(comm)]
    for comm in whole:
        compare_clocks(comm, timeline)
    timeline.close()
    for comm in whole:
        gather_parts(comm, timeline)
    of_process.is_complete = True


def compare_clocks(comm: MPI.Intracomm, timeline: Timeline) -> None:
    """Rank 0's with one rank's of each other clock. Collective; takes as long as 20 short messages to each."""
    names = comm.allgather(timeline.clock)
    others = [names.index(name) for name in dict.fromkeys(names)][1:]
    if comm.rank == 0:
        for rank in others:
            clocks.answer(comm, rank, timeline.now)
    elif comm.rank in others:
        found = clocks.compare_with(comm, 0, timeline.now)
        timeline.add_comparison(names[0], found.at, found.ahead, found.error)


def gather_parts(comm: MPI.Intracomm, timeline: Timeline) -> None:
    """To the job's rank 0, those that it does not see in the folder: of nodes that do not share it. Collective."""
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
    """It gets its name once all of it is here: should the folder be shared, the sender has removed its own by then."""
    messages = iter(lambda: comm.recv(source=rank), b"")
    with contextlib.suppress(OSError), create(f"{path}.received", binary=True) as file:
        file.writelines(messages)
    collections.deque(messages, 0)  # the rank sends on, though they could not be written
    with contextlib.suppress(OSError):
        os.replace(f"{path}.received", path)
