"""When the job will be ended, whatever it does: as the user says, or as Slurm says again and again."""

from __future__ import annotations

import math
import threading
import time
import weakref

from mpistrat.cluster_resolver.slurm_job import SlurmJob
from mpistrat.machine.notices import tell

# It asks again after a tenth of the time that is left: limits can change.
SHORTEST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
_SECONDS_TO_ANSWER = 30.0


class TimeLimit:
    """One rank keeps it; nothing ever waits for Slurm, which is asked on a thread of its own.

    Args:
        job: whose end Slurm is asked for, None outside Slurm.
        end_time: the user's, in seconds since 1970; then nobody is asked.
    """

    def __init__(self, job: SlurmJob | None, end_time: float | None = None) -> None:
        known = end_time if job is None or end_time is not None else job.end_time
        self._end = _End(math.inf if known is None else known)
        if job is None or end_time is not None:
            return
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        threading.Thread(
            target=_ask_again_and_again,
            args=(job, self._end, known is not None, stop),
            name="mpistrat time limit",
            daemon=True,
        ).start()

    def seconds_left(self) -> float:
        """inf where no limit is known."""
        return self._end.time - time.time()


class _End:
    def __init__(self, time: float) -> None:
        self.time = time


def _ask_again_and_again(job: SlurmJob, end: _End, known: bool, stop: threading.Event) -> None:
    told = known  # what Slurm has said at the start is good enough to go on without a word
    while True:
        try:
            end.time = job.ask_end_time(_SECONDS_TO_ANSWER)
        except Exception as error:  # whatever it is, the next answer may be right
            if not told:
                told = True
                tell(
                    f"the time limit of job {job.job_id} is not known: {type(error).__name__}: {error}. Nothing is "
                    "saved before it is reached, unless a signal announces it (sbatch --signal), or "
                    "TerminationConfig(end_time=...) gives it"
                )
        left = (end.time - time.time()) / 10
        if stop.wait(min(max(left, SHORTEST_PAUSE), LONGEST_PAUSE)):
            return
