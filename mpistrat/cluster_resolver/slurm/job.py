"""The Slurm job of this process: its number, when it will be ended, and how it gets back into the queue."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mpistrat.cluster_resolver.launcher import environment_of_children

# "1234". Each task of a job array has a number of its own, but the last task has the array's.
JOB_ID = "SLURM_JOB_ID"
ARRAY_ID = "SLURM_ARRAY_JOB_ID"  # "1234", which Slurm's commands take for all tasks of the array
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"  # "3"
END_TIME = "SLURM_JOB_END_TIME"  # "1795329466", seconds since 1970; Slurm 22.05 does not set it
# Has squeue print times as END_TIME has them, in no time zone.
_TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
_NO_LIMIT = ("NONE", "UNLIMITED")  # "N/A" and "0": not known now


_VARIABLES = ("SLURM_", "SLURMD_NODENAME", "SRUN_CPUS_PER_TASK")
# Of no use for a diagnosis, or nobody's business
_LEFT_OUT = ("SLURM_JWT", "SLURM_CONF", "SLURM_SUBMIT", "SLURM_JOB_USER", "SLURM_JOB_UID")


class SlurmError(RuntimeError):
    """Slurm's commands are missing here, or fail; says which, and how."""


@dataclass(frozen=True)
class SlurmJob:
    """
    Attributes:
        job_id: as Slurm's commands take it: "1234", or "1234_3" for a task of a job array.
        end_time: when it was to be ended, in seconds since 1970, as it began; None where Slurm did not say.
    """

    job_id: str
    end_time: float | None = None

    def ask_end_time(self, seconds: float) -> float:
        """When the job will be ended, as `squeue` says now; inf if it has no limit.

        Args: seconds: how long squeue may take.
        Raises: SlurmError.
        """
        # Of a heterogeneous job, a line for each component: "1795329466".
        answer = _output_of(["squeue", "-h", "-j", self.job_id, "-o", "%e"], seconds)
        times = [_seconds_since_1970(line.strip()) for line in answer.splitlines()]
        if not times:
            raise SlurmError(f"squeue does not know job {self.job_id}")
        return min(times)

    def requeue(self, seconds: float) -> None:
        """End the job, and put it back into the queue: Slurm then signals all its processes, and kills those that stay.

        Raises: SlurmError.
        """
        _output_of(["scontrol", "requeue", self.job_id], seconds)


def slurm_job(environ: Mapping[str, str] = os.environ) -> SlurmJob | None:
    """The job that this process belongs to; None outside Slurm."""
    job_id, end_time = environ.get(JOB_ID, ""), environ.get(END_TIME, "")
    if not job_id:
        return None
    array, task = environ.get(ARRAY_ID, ""), environ.get(ARRAY_TASK, "")
    return SlurmJob(f"{array}_{task}" if array and task else job_id, _positive(end_time))


def slurm_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What Slurm says of job, step and task."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(_VARIABLES) and not name.startswith(_LEFT_OUT)
    }


def _positive(text: str) -> float | None:
    """The number; None of "0", and of what is none."""
    return float(text) if text.isdecimal() and float(text) > 0 else None


def _seconds_since_1970(text: str) -> float:
    if text in _NO_LIMIT:
        return math.inf
    try:
        return _positive(text) or time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        raise SlurmError(f"squeue gave {text!r} for the time at which the job ends") from None


def _output_of(command: list[str], seconds: float) -> str:
    import subprocess  # here, because it makes importing mpistrat slower

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
        raise SlurmError(f"{command[0]} has not answered within {seconds:g} s") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise SlurmError(f"{' '.join(command)}: {reason}")
    return done.stdout
