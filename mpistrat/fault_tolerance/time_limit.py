"""When the job will be ended, whatever it does: as the user says, or as Slurm says again and again."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

from mpistrat.cluster_resolver.slurm.job import SlurmJob
from mpistrat.fault_tolerance.polling import keep_asking

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
        end = self._end = SimpleNamespace(time=math.inf if end_time is None else end_time)
        if job is None or end_time is not None:
            return
        if job.end_time is not None:
            end.time = job.end_time

        def ask() -> bool:
            end.time = job.ask_end_time(_SECONDS_TO_ANSWER)
            return False

        def pause() -> float:
            return min(max((end.time - time.time()) / 10, SHORTEST_PAUSE), LONGEST_PAUSE)

        def explain(error: str) -> str:
            return (
                f"the time limit of job {job.job_id} is not known: {error}. Nothing is saved before it is reached, "
                "unless a signal announces it (sbatch --signal), or TerminationConfig(end_time=...) gives it"
            )

        # What Slurm has said at the start is good enough to go on without a word.
        explain_failure = explain if job.end_time is None else None
        keep_asking(self, "mpistrat time limit", ask, pause, explain_failure)

    def seconds_left(self) -> float:
        """inf where no limit is known."""
        return self._end.time - time.time()
