"""The one timeline of this process, and the merging of all parts at the program's end."""

from __future__ import annotations

import atexit
import os
import socket

from mpistrat.machine.notices import tell
from mpistrat.trace import merging
from mpistrat.trace.timeline import Timeline, host_clock

# Parts up to this size merge at exit: at 6 MB/s, into a file six times as large. Perfetto still opens it.
MOST_BYTES_AT_EXIT = 64_000_000

_timeline: Timeline | None = None
# Whether `of_job` finishes the timeline, when the programs of all ranks have ended.
ends_with_job = False


def begin(folder: str, rank: int, size: int) -> Timeline:
    """Return this process's timeline; the first call makes it. It is finished at the program's end.

    Later calls ignore their arguments.
    Args:
        folder: the folder for the parts: a file of each rank.
        rank, size: this process's number in the job, and the number of ranks. Rank 0 removes an older trace.
    Raises: OSError if this rank's part cannot be written.
    """
    global _timeline
    if _timeline is None:
        if rank == 0:
            merging.remove_older(folder, size)
        _timeline = Timeline(folder, rank, size, socket.gethostname(), host_clock())
        atexit.register(_finish_alone, os.getpid(), _timeline, size)
    return _timeline


def _finish_alone(pid: int, timeline: Timeline, size: int) -> None:
    """Close the timeline at the program's end, and merge it in a job of one rank. A forked child does nothing."""
    if os.getpid() != pid or ends_with_job:
        return
    timeline.close()
    if size == 1:
        merge_parts(timeline)


def merge_parts(timeline: Timeline) -> None:
    """Merge the parts in the timeline's folder, if they have at most 64 MB, and tell the user where the trace is.

    It removes the parts if the merged trace is complete. Called by: rank 0, when all ranks have closed their parts.
    """
    folder = timeline.folder
    try:
        nbytes = merging.size_of_parts(folder)
        if nbytes > MOST_BYTES_AT_EXIT:
            text = (
                f"the trace is large: {nbytes / 1e6:.0f} MB of parts. To make one file of them: "
                f"mpistrat trace {folder}"
            )
        else:
            merged = merging.merge(folder)
            if merged.is_complete:
                merging.remove_parts(folder)
            text = merged.describe()
        tell(text, "INFO")
    except OSError as error:
        tell(f"the trace could not be written: {error}. Its parts are in {folder}")
