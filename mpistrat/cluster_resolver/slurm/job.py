"""The Slurm job of this process: its number, its end time, and requeueing it."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

from mpistrat.cluster_resolver.launcher import environment_of_children
from mpistrat.settings import Environment

# "1234". Each task of a job array has another job number; the last task's number is also the array's.
JOB_ID = "SLURM_JOB_ID"
ARRAY_ID = "SLURM_ARRAY_JOB_ID"  # "1234"; for Slurm's commands it means all tasks of the array
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"  # "3"
END_TIME = "SLURM_JOB_END_TIME"  # "1795329466", seconds since 1970; Slurm 22.05 does not set it
# Makes squeue print times in seconds since 1970, as in END_TIME, without a time zone.
_TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
_NO_LIMIT = ("NONE", "UNLIMITED")  # "N/A" and "0" mean that squeue does not know the time now


_VARIABLES = ("SLURM_", "SLURMD_NODENAME", "SRUN_CPUS_PER_TASK")
# Variables that do not help a diagnosis, or that are private
_LEFT_OUT = ("SLURM_JWT", "SLURM_CONF", "SLURM_SUBMIT", "SLURM_JOB_USER", "SLURM_JOB_UID")


class SlurmError(RuntimeError):
    """One of Slurm's commands is missing, fails, or answers too late. The text names the command and the reason."""


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job, or one task of a job array.

    Attributes:
        job_id: the job's number for Slurm's commands: "1234", or "1234_3" for a task of a job array.
        end_time: the end that was planned when the job began, in seconds since 1970; None if Slurm did not say it.
    """

    job_id: str
    end_time: float | None = None

    def ask_end_time(self, seconds: float) -> float:
        """Ask `squeue` when Slurm will end the job.

        Called by: the watcher of the job's time limit, again and again, because the limit may be changed.
        Args: seconds: the timeout of squeue.
        Returns: seconds since 1970, for a heterogeneous job of the component that ends first; inf if there is no time
            limit.
        Raises: SlurmError if squeue is missing, fails, takes longer, or does not know the job or its end.
        """
        # For a heterogeneous job, squeue prints a line such as "1795329466" for each component.
        answer = _output_of(["squeue", "-h", "-j", self.job_id, "-o", "%e"], seconds)
        times = [_seconds_since_1970(line.strip()) for line in answer.splitlines()]
        if not times:
            raise SlurmError(f"squeue does not know job {self.job_id}")
        return min(times)

    def requeue(self, seconds: float) -> None:
        """Tell Slurm to end the job and put it back into the queue.

        Slurm signals the job's processes, and later kills the processes that are still alive. Returns before the end.
        Called by: the preemption handler on rank 0, when the program is about to leave.
        Args: seconds: the timeout of scontrol.
        Raises: SlurmError if scontrol is missing, fails or takes longer.
        """
        _output_of(["scontrol", "requeue", self.job_id], seconds)


def slurm_job(environ: Environment = os.environ) -> SlurmJob | None:
    """Return the Slurm job of this process; None outside Slurm."""
    job_id = environ.get(JOB_ID, "")
    if not job_id:
        return None
    array = environ.get(ARRAY_ID, "")
    task = environ.get(ARRAY_TASK, "")
    if array and task:
        job_id = f"{array}_{task}"
    return SlurmJob(job_id, _positive(environ.get(END_TIME, "")))


def slurm_variables(environ: Environment = os.environ) -> dict[str, str]:
    """Return Slurm's variables about the job, the step and the task, sorted by name; {} outside Slurm.

    Private variables, and variables that do not help a diagnosis, are left out. Called by: `mpistrat doctor`.
    """
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(_VARIABLES) and not name.startswith(_LEFT_OUT)
    }


def _positive(text: str) -> float | None:
    """Return the number in `text`; None for "0", and if `text` is no number."""
    if text.isdecimal() and float(text) > 0:
        return float(text)
    return None


def _seconds_since_1970(text: str) -> float:
    if text in _NO_LIMIT:
        return math.inf
    try:
        return _positive(text) or time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        raise SlurmError(f"squeue gave {text!r} for the time at which the job ends") from None


def _output_of(command: list[str], seconds: float) -> str:
    import subprocess  # imported here, so that `import mpistrat` stays fast

    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**environment_of_children(), **_TIME_FORMAT},
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} not answered within {seconds:g} s; try by hand") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise SlurmError(f"{' '.join(command)}: {reason}")
    return done.stdout
