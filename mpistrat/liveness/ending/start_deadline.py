"""Ends the job with a message if some ranks never join its start, instead of waiting for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mpistrat.cluster_resolver.launcher import environment_of_children
from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.ending import rank_end
from mpistrat.liveness.observer import observation
from mpistrat.liveness.records.record import RankRecord
from mpistrat.machine.interpreter import IMPORT_WITHOUT_INIT, python_of_helpers
from mpistrat.settings import start_seconds

# The program of a process that runs while its parent is inside MPI_Init. Its stdin ends if the parent goes on or dies.
_WATCHER = f"""
import os, select, sys
parent, seconds, message = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if select.select([0], [], [], seconds)[0] or os.getppid() != parent:
    os._exit(0)
{IMPORT_WITHOUT_INIT}
from mpistrat.liveness.observer.stderr_proxy import say_on_launcher
from mpistrat.machine.notices import say
say(message, last=True) or say_on_launcher(parent, message)
os.kill(parent, 9)
"""


@contextmanager
def start_deadline(
    what: str, *, rank: int | None = None, size: int | None = None
) -> Iterator[None]:
    """End the job if the block takes longer than MPISTRAT_START_SECONDS (300 by default; 0: no limit).

    Entered around: the first collective call of the job's ranks, such as the duplication of a communicator. It yields
    None. The block must release the GIL while it waits, because a thread ends the job. mpi4py's calls do so, except for
    MPI_Init, see `init_deadline`. Even without a limit, the rank's record shows that the rank waits.

    Args:
        what: the name of the call, for the message.
        rank: this rank's number, for the message; None if it is not known.
        size: number of ranks of the job; None if it is not known; 1: no limit.
    """
    seconds = start_seconds()
    with _starting(size), ExitStack() as stack:
        if seconds and size != 1:
            message = _message(what, seconds, rank, size)
            timer = threading.Timer(seconds, lambda: rank_end.rank_end().end_job(message, 1))
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        yield


@contextmanager
def init_deadline(*, rank: int | None = None, size: int | None = None) -> Iterator[None]:
    """End the job if the block, a call of MPI_Init, takes longer than MPISTRAT_START_SECONDS (0: no limit).

    mpi4py holds the GIL in MPI_Init. So a child process watches the time, prints the message, and kills this process;
    the launcher then ends the job. Without a Python interpreter for the child there is no limit.

    Args:
        rank: this rank's number, for the message; None if it is not known.
        size: number of ranks of the job; None if it is not known; 1: no limit.
    """
    seconds = start_seconds()
    python = python_of_helpers()
    if not seconds or size == 1 or python is None:
        with _starting(size):
            yield
        return
    import subprocess  # imported here, so that `import mpistrat` stays fast

    message = f"\nmpistrat: {_message('MPI_Init', seconds, rank, size)}\n"
    arguments = [str(os.getpid()), str(seconds), message]
    command = [python, "-I", "-S", "-c", _WATCHER, *arguments]
    # The child has its own session, so that it prints no traceback on Ctrl-C. It gets none of the launcher's variables,
    # and only stderr as output, so that it keeps no other pipe open.
    with (
        subprocess.Popen(  # the end of the block closes its input
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment_of_children(),
        ),
        _starting(size),
    ):
        yield


@contextmanager
def _starting(size: int | None) -> Iterator[None]:
    """Let this rank's record show in the block that the rank waits for all ranks of the job to start, and since when.

    The observer reads the record.

    Args: size: number of ranks that the block waits for. If it is not the number of the job's ranks, or None, the
        record stays unchanged.
    """
    observed = observation.current
    record = observed.record if observed and observed.record.size == size else RankRecord(None)
    before = record.starting  # not 0 if a block around this one has set it
    record.starting = before or time.monotonic_ns()
    try:
        yield
    finally:
        record.starting = before


def _message(what: str, seconds: float, rank: int | None, size: int | None) -> str:
    who = "a rank" if rank is None else f"rank {rank}"
    started = "started processes" if size is None else f"{size} started processes"
    return (
        f"{who} waited {seconds:g} s in {what} for the other ranks: some of the {started} never got "
        f"there. It waits at {call_site(sys._getframe())}.\n"
        "Every rank must build the strategy (or call MPI_Init), so the job ends: look for an `if rank == 0:` around "
        f"the call, for a rank that has ended or is still busy, or set {start_seconds.name} higher (0: no limit)."
    )
