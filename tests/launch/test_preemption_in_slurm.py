"""Jobs that a real Slurm ends: each goes on where it was, and comes to the same bits as one that was let alone."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.preempted_runs import PROGRAM, check_resumed, starts_of, steps_done, until
from mpi_launcher import Launcher
from slurm_cluster import BatchJob, SlurmCluster

RANKS = 2
SECONDS_PER_STEP = 0.05  # until they may hurry
STEPS_PER_START = 600  # of which no more than 25 s are taken
MARGIN = 5
SECONDS = 180.0

TEMPLATE = Path(__file__).parents[2] / "slurm" / "requeue.sbatch"

SRUN = "srun --mpi=pmi2 PROGRAM"
REQUEUE = """
[ $code -ne 42 ] || scontrol requeue "$SLURM_JOB_ID"
exit $code"""
# Slurm's signals kill the daemons of Open MPI's mpirun; the batch script can get one alone, and hand it on to mpirun.
HANDED_ON = """\
set -e
trap 'kill -USR1 $mpirun' USR1
mpirun PROGRAM & mpirun=$!
code=0
while true; do wait $mpirun && code=0 || code=$?; kill -0 $mpirun 2>/dev/null || break; done"""


@dataclass(frozen=True)
class Way:
    """A batch script, what happens to its job from outside, and what the program says of it.

    PROGRAM in the script stands for the program with its arguments, JOB in the command for the job's number.
    """

    mpi: str
    script: str
    command: str
    says: str
    arguments: str = "requeue"
    minutes: int = 60


WAYS = {
    "scancel --signal": Way("MPICH", SRUN, "scancel --signal=USR1 JOB", "SIGUSR1 has come"),
    # Of two minutes, the program asks again after a tenth; it leaves when twice the longest step and MARGIN are left.
    "time limit": Way(
        "MPICH",
        SRUN,
        "scontrol update JobId=JOB EndTime=now+25",
        "the end is near",
        f"requeue margin={MARGIN}",
        2,
    ),
    "Open MPI": Way(
        "Open MPI",
        f"{HANDED_ON}\nexit $code",
        "scancel --batch --signal=USR1 JOB",
        "SIGUSR1 has come",
    ),
    # Its script hears nothing: what the ranks end with is all that it goes by.
    "requeue.sbatch": Way(
        "MPICH",
        TEMPLATE.read_text().replace('python "$@"', "PROGRAM"),
        "scancel --signal=USR1 JOB",
        "SIGUSR1 has come",
        "",
    ),
    "requeued by Slurm": Way("MPICH", SRUN, "scontrol requeue JOB", "SIGTERM has come", ""),
    "requeued by the script": Way(
        "MPICH", f"{SRUN}\ncode=$?{REQUEUE}", "scancel --signal=TERM JOB", "SIGTERM has come", ""
    ),
    "Open MPI, requeued by the script": Way(
        "Open MPI",
        f"{HANDED_ON}{REQUEUE}",
        "scancel --batch --signal=USR1 JOB",
        "SIGUSR1 has come",
        "",
    ),
}
USUAL = ("scancel --signal", "time limit", "Open MPI", "requeue.sbatch")


def submit(slurm: SlurmCluster, way: Way, folder: Path, steps: int) -> BatchJob:
    folder.mkdir(parents=True)
    program = [sys.executable, str(PROGRAM), str(folder), str(steps), str(SECONDS_PER_STEP)]
    script = folder / "job.sh"
    text = way.script.replace("PROGRAM", f"{shlex.join(program)} {way.arguments}")
    script.write_text(f"#!/bin/bash\n{text}\n")
    options = (f"--nodes={RANKS}", "--ntasks-per-node=1", "--cpus-per-task=1", "--requeue")
    options += (f"--time={way.minutes}",)
    return slurm.sbatch(Launcher.named(way.mpi), script, "--open-mode=append", *options)


def wait_until(condition: Callable[[], bool], job: BatchJob, what: str) -> None:
    try:
        until(condition, what, SECONDS)
    except AssertionError as late:
        raise AssertionError(f"{late}\n{job.report()}") from None


def preempt(slurm: SlurmCluster, way: Way, job: BatchJob, folder: Path, start: int) -> None:
    """In its start number `start`, after three more steps, end the job from outside."""

    def has_done_three_more() -> bool:
        starts = starts_of(folder, RANKS)
        if min(map(len, starts)) < start:
            return False
        return steps_done(folder, RANKS) >= starts[0][-1][0] + 3

    wait_until(has_done_three_more, job, f"three steps of start {start}")
    slurm.run(*way.command.replace("JOB", job.id).split())


def undisturbed(folder: Path, steps: int) -> Path:
    """The folder of a job that was let alone."""
    folder /= "undisturbed"
    folder.mkdir()
    arguments = [PROGRAM, folder, str(steps), "0"]
    done = Launcher.named("MPICH").run_python(RANKS, *arguments, seconds=120)
    assert done.returncode == 0, done.output
    return folder


def hurry(job: BatchJob, folder: Path, starts: int) -> None:
    """Once its last start has begun, it may come to its end."""
    began = lambda: min(map(len, starts_of(folder, RANKS))) == starts  # noqa: E731
    wait_until(began, job, "the last start")
    (folder / "hurry").touch()


def check(way: Way, job: BatchJob, folder: Path, starts: int, reference: Path) -> int:
    """It has come to its end, as if nothing had happened; returns the most steps lost."""
    assert job.wait(SECONDS) == "COMPLETED", job.report()
    assert job.facts()["Restarts"] == str(starts - 1), job.report()
    lost = check_resumed(folder, RANKS, starts, reference)
    assert job.output.count(f"mpistrat: {way.says}: saved") == starts - 1, job.report()
    assert "Traceback" not in job.output, job.report()
    return lost


@pytest.mark.time_limit(300)
def test_jobs_go_on_where_they_were_ended(slurm: SlurmCluster, tmp_path: Path) -> None:
    steps = STEPS_PER_START
    jobs = [(WAYS[name], tmp_path / name.replace(" ", "-")) for name in USUAL]
    submitted = [(way, submit(slurm, way, folder, steps), folder) for way, folder in jobs]
    for way, job, folder in submitted:
        preempt(slurm, way, job, folder, start=1)
    for _, job, folder in submitted:  # all, before anything that lasts: one has a time limit
        hurry(job, folder, 2)
    reference = undisturbed(tmp_path, steps)
    for way, job, folder in submitted:
        check(way, job, folder, 2, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.time_limit(600)
def test_jobs_that_are_ended_four_times(slurm: SlurmCluster, tmp_path: Path, name: str) -> None:
    """Twenty-eight in all, of each way as many."""
    way, folder = WAYS[name], tmp_path / "job"
    steps = 4 * STEPS_PER_START
    job = submit(slurm, way, folder, steps)
    for start in range(1, 5):
        preempt(slurm, way, job, folder, start)
    hurry(job, folder, 5)
    lost = check(way, job, folder, 5, undisturbed(tmp_path, steps))
    print(f"{name}: ended 4 times, resumed 4 times, {lost} steps lost at most")
