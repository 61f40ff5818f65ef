"""The time when the job will be ended: the user's, or Slurm's, asked again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace

from mpistrat.cluster_resolver.slurm.job import SlurmJob
from mpistrat.fault_tolerance.polling import keep_asking

# Slurm is asked again after a tenth of the time that is left, because limits can change. These bounds are in seconds.
SHORTEST_PAUSE = 10.0
LONGEST_PAUSE = 600.0
_SECONDS_TO_ANSWER = 30.0


class TimeLimit:
    """The time limit of the job. A thread asks Slurm for the limit again and again, so that no step waits for Slurm.

    Without a Slurm job, and with `end_time`, it starts no thread.

    Args:
        job: the Slurm job; None outside Slurm.
        end_time: the user's end time, in seconds since 1970; None asks Slurm.
    """

    def __init__(self, job: SlurmJob | None, end_time: float | None = None) -> None:
        end = self._end = SimpleNamespace(time=math.inf if end_time is None else end_time)
        if job is None or end_time is not None:
            return

        def ask() -> bool:
            end.time = job.ask_end_time(_SECONDS_TO_ANSWER)
            return False

        def pause() -> float:
            return min(max((end.time - time.time()) / 10, SHORTEST_PAUSE), LONGEST_PAUSE)

        def explain(error: str) -> str:
            return (
                f"the time limit of job {job.job_id} is not known: {error}. Nothing is saved before the limit, "
                "unless a signal announces it (sbatch --signal), or TerminationConfig(end_time=...) gives it"
            )

        explain_failure: Callable[[str], str] | None = explain
        if job.end_time is not None:
            # Slurm has given the end time at the start of the job, so a failure to ask again is not reported.
            end.time = job.end_time
            explain_failure = None
        keep_asking(self, "mpistrat time limit", ask, pause, explain_failure)

    def seconds_left(self) -> float:
        """Return the seconds until the job is ended, negative after that; inf if no limit is known."""
        return self._end.time - time.time()
