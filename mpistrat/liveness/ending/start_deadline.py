"""A start-up that some ranks never join ends with a message instead of waiting for ever."""

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

# Runs while its parent is inside MPI_Init: reads the end of its input when the parent goes on or is gone.
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
    """End this process (and so the job) when the block takes longer than MPISTRAT_START_SECONDS (300).

    For the first collective call that joins the ranks of a job: `what` names it. The block must release the GIL while
    it waits, as mpi4py's calls do, except for MPI_Init: see `init_deadline`. The observer knows meanwhile that this
    rank waits, also where there is no limit.
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
    """`start_deadline` for MPI_Init. mpi4py holds the GIL meanwhile, so a process watches instead of a thread."""
    seconds = start_seconds()
    python = python_of_helpers()
    if not seconds or size == 1 or python is None:
        with _starting(size):
            yield
        return
    import subprocess  # here, because it makes importing mpistrat slower

    message = f"\nmpistrat: {_message('MPI_Init', seconds, rank, size)}\n"
    command = [python, "-I", "-S", "-c", _WATCHER, str(os.getpid()), str(seconds), message]
    # In a session of its own, so that Ctrl-C does not make it print a traceback; without the launcher's variables;
    # and with no output but stderr, so that it cannot keep anybody's pipe open.
    with (
        subprocess.Popen(  # whose input is closed at the block's end
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
    """The observer knows that this rank waits for all ranks of the job, if those are `size`."""
    observed = observation.current
    record = observed.record if observed and observed.record.size == size else RankRecord(None)
    before = record.starting  # of a block around this one
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
        "Every rank must build the strategy (or call MPI_Init). Does an `if rank == 0:` stand around it, did a "
        "rank end or fail before, or is one still busy? "
        f"{start_seconds.name}=N allows N seconds (0: no limit). Ending the job."
    )
