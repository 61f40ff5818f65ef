"""Jobs that a real Slurm ends: each goes on where it was, and comes to the same bits as one that was let alone."""

import dataclasses
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.preempted_runs import PROGRAM, check_resumed, starts_of, steps_done, until
from support.clusters.slurm_cluster import BatchJob, SlurmCluster
from support.documentation import blocks_of
from support.harness.mpi_launcher import Launcher

pytestmark = pytest.mark.slurm

RANKS = 2
SECONDS_PER_STEP = 0.05  # until they may hurry
STEPS_PER_START = 600  # of which no more than 25 s are taken
MARGIN = 5
SECONDS = 180.0

TEMPLATE = Path(__file__).parents[2] / "slurm" / "requeue.sbatch"

# The scripts of docs/preemption.md. Slurm's signals kill the daemons of Open MPI's mpirun; the batch script can get one
# alone, and hand it on to mpirun.
ON_THE_PAGE = [b.text for b in blocks_of("docs/preemption.md") if b.language == "sh"]
SRUN = "srun --mpi=pmi2 PROGRAM"
REQUEUED_BY_SCRIPT = ON_THE_PAGE[0].replace("…", "--mpi=pmi2 PROGRAM")
REQUEUE = ON_THE_PAGE[0].partition("\n")[2]
HANDED_ON = ON_THE_PAGE[1].replace("python train.py", "PROGRAM")


@dataclass(frozen=True)
class Way:
    """A batch script, what happens to its job from outside, and what the program says of it.

    PROGRAM in the script stands for the program with its arguments, JOB in the command for the job's number. Without a
    command, something happens because of sbatch's `options`.
    """

    mpi: str
    script: str
    command: str
    says: str
    arguments: str = "requeue"
    minutes: int = 60
    options: tuple[str, ...] = ()


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
        HANDED_ON,
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
    "MPICH's mpirun": Way(
        "MPICH", "mpirun PROGRAM", "scancel --signal=USR1 JOB", "SIGUSR1 has come"
    ),
    "preempted": Way(
        "MPICH",
        SRUN,
        "sbatch --partition=urgent --nodes=4 --exclusive --output=/dev/null --wrap=true",
        "SIGTERM has come",
        "",
    ),
    "requeued by Slurm": Way("MPICH", SRUN, "scontrol requeue JOB", "SIGTERM has come", ""),
    "requeued by the script": Way(
        "MPICH", REQUEUED_BY_SCRIPT, "scancel --signal=TERM JOB", "SIGTERM has come", ""
    ),
    "Open MPI, requeued by the script": Way(
        "Open MPI",
        HANDED_ON.replace("exit $code\n", REQUEUE),
        "scancel --batch --signal=USR1 JOB",
        "SIGUSR1 has come",
        "",
    ),
}
# As Slurm 23 has it set for the job. Where there is no squeue, nothing else is known of its end.
END_TIME = f"""\
if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then
    SLURM_JOB_END_TIME=$(SLURM_TIME_FORMAT=%s squeue -h -j $SLURM_JOB_ID -o %e)
    export SLURM_JOB_END_TIME
    hidden=$PWD/hidden && mkdir -p $hidden && printf '#!/bin/sh\\nexit 1\\n' >$hidden/squeue && chmod +x $hidden/squeue
    PATH=$hidden:$PATH
fi
{SRUN}"""
# Slurm looks every 30 s whether a signal is due within the next 30 s: those of the first three come 30 to 60 s after
# the beginning. The fourth leaves after 30 s.
LEFT_ALONE = {
    "--signal": Way(
        "MPICH", SRUN, "", "SIGUSR1 has come", "requeue margin=1", 2, ("--signal=USR1@60",)
    ),
    "--signal=B": Way(
        "Open MPI",
        HANDED_ON,
        "",
        "SIGUSR1 has come",
        "requeue margin=1",
        2,
        ("--signal=B:USR1@60",),
    ),
    "requeue.sbatch": dataclasses.replace(WAYS["requeue.sbatch"], command="", minutes=6),
    "SLURM_JOB_END_TIME": Way("MPICH", END_TIME, "", "the end is near", "requeue margin=30", 1),
}
USUAL = ("scancel --signal", "time limit", "Open MPI", "requeue.sbatch")


def submit(slurm: SlurmCluster, way: Way, folder: Path, steps: int) -> BatchJob:
    folder.mkdir(parents=True)
    program = [sys.executable, str(PROGRAM), str(folder), str(steps), str(SECONDS_PER_STEP)]
    script = folder / "job.sh"
    text = way.script.replace("PROGRAM", f"{shlex.join(program)} {way.arguments}")
    script.write_text(f"#!/bin/bash\n{text}\n")
    options = (f"--nodes={RANKS}", "--ntasks-per-node=1", "--cpus-per-task=1", "--requeue")
    options += (f"--time={way.minutes}", *way.options)
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
    if way.command:
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
    assert job.output.count(": saved") == starts - 1, job.report()
    assert job.output.count(f"mpistrat: {way.says}: saved") == starts - 1, job.report()
    assert "Traceback" not in job.output, job.report()
    return lost


@pytest.mark.long(
    "One of its jobs has a time limit of which 25 s are left, and Slurm takes seconds to requeue."
)
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
    """Thirty-six in all, of each way as many."""
    way, folder = WAYS[name], tmp_path / "job"
    steps = 4 * STEPS_PER_START
    job = submit(slurm, way, folder, steps)
    for start in range(1, 5):
        preempt(slurm, way, job, folder, start)
    hurry(job, folder, 5)
    lost = check(way, job, folder, 5, undisturbed(tmp_path, steps))
    print(f"{name}: ended 4 times, resumed 4 times, {lost} steps lost at most")


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_jobs_that_nobody_touches(slurm: SlurmCluster, tmp_path: Path) -> None:
    """What `sbatch --signal` sends, and a time limit that is known or changes, without a signal."""
    steps = 4 * STEPS_PER_START
    # This one would leave after 35 s. It gets more time before, and learns of it.
    more_time = Way(
        "MPICH", SRUN, "scontrol update JobId=JOB TimeLimit=60", "", "margin=25", minutes=1
    )
    goes_on = submit(slurm, more_time, tmp_path / "goes_on", steps)
    jobs = [(way, tmp_path / name) for name, way in LEFT_ALONE.items()]
    submitted = [(way, submit(slurm, way, folder, steps), folder) for way, folder in jobs]
    preempt(slurm, more_time, goes_on, tmp_path / "goes_on", 1)
    again = submitted.copy()

    def all_have_begun_again() -> bool:
        """And get time enough not to be ended once more."""
        for run in list(again):
            _, job, folder = run
            if min(map(len, starts_of(folder, RANKS))) == 2:
                slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
                (folder / "hurry").touch()
                again.remove(run)
        return not again

    wait_until(all_have_begun_again, submitted[0][1], "second starts")
    hurry(goes_on, tmp_path / "goes_on", 1)
    reference = undisturbed(tmp_path, steps)
    for way, job, folder in submitted:
        check(way, job, folder, 2, reference)
    check(more_time, goes_on, tmp_path / "goes_on", 1, reference)


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("scancel --signal=USR1 JOB", ()),
        ("scancel --signal=TERM JOB", ()),
        ("", ("--signal=USR1@60",)),
    ],
)
def test_open_mpi_s_mpirun_does_not_outlive_a_signal_to_the_whole_job(
    slurm: SlurmCluster, tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    """Ranks may save a checkpoint or may not; the script does not learn that they did, and the job is not requeued."""
    script = f"mpirun PROGRAM\ncode=$?\n{REQUEUE}"
    way = Way("Open MPI", script, command, "", "margin=1", 2, options)
    job = submit(slurm, way, tmp_path / "job", 10 * STEPS_PER_START)
    preempt(slurm, way, job, tmp_path / "job", 1)
    job.wait(SECONDS)
    facts = job.facts()
    assert (facts["ExitCode"] != "42:0", facts["Restarts"]) == (True, "0"), job.report()
    assert len(starts_of(tmp_path / "job", RANKS)[0]) == 1
    assert not (tmp_path / "job" / "final.npy").exists()
