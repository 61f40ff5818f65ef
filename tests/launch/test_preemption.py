"""Which signals reach the ranks through each launcher: the table of docs/preemption.md. All ranks leave together."""

import signal
import sys
from pathlib import Path

import pytest

from launch import signalled_jobs
from launch.preempted_runs import PROGRAM, check_resumed, starts_of, steps_done, until
from launch.signalled_jobs import signalled_command
from support.harness.mpi_launcher import Job, Launcher

RANKS = 2
MORE_STEPS_THAN_IT_TAKES = 10_000


def signalled(
    launcher: Launcher, folder: Path, number: int, *arguments: str, ranks: int, group: bool = False
) -> Job:
    """Train; after the third step, send a signal to the launcher; without one (0 ranks) to the program.

    Or to its whole process group, workers included.
    """
    program = [sys.executable, str(PROGRAM), str(folder), str(MORE_STEPS_THAN_IT_TAKES), "0.02"]
    program += arguments
    command = launcher.command(ranks, program) if ranks else program

    def after_three_steps() -> None:
        until(lambda: steps_done(folder, max(ranks, 1)) >= 3, "three steps")

    environment = launcher.environment()
    job, _ = signalled_command(
        command, environment, folder, number, after_three_steps, group=group, limit=150.0
    )
    return job


SLOW = pytest.mark.slow
# What mpiexec does with a signal that it gets itself: whether the ranks get it, and the job so ends with a checkpoint.
FORWARDED = {
    ("MPICH", signal.SIGTERM): True,
    ("MPICH", signal.SIGUSR1): True,
    ("MPICH", signal.SIGUSR2): False,
    ("MPICH", signal.SIGHUP): False,
    ("Open MPI", signal.SIGTERM): False,
    ("Open MPI", signal.SIGUSR1): True,
    ("Open MPI", signal.SIGUSR2): True,
    ("Open MPI", signal.SIGHUP): False,
}


USUAL = (("MPICH", signal.SIGTERM), ("Open MPI", signal.SIGUSR1))


@pytest.mark.parametrize(
    ("mpi", "number"),
    [pytest.param(*way, marks=() if way in USUAL else SLOW) for way in FORWARDED],
)
def test_a_signal_to_the_launcher(tmp_path: Path, mpi: str, number: signal.Signals) -> None:
    job = signalled(Launcher.named(mpi), tmp_path, number, "SIGHUP", ranks=RANKS)
    saved = FORWARDED[mpi, number]
    assert job.returncode == 42 if saved else job.returncode != 0, job.output
    assert (f"{number.name} has come: saved" in job.stderr) == saved, job.output
    if saved:
        left_together(job, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=SLOW)])
def test_workers_of_a_loader_go_on_when_all_processes_are_signalled(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As Slurm does: ranks need their next batches until they leave."""
    mpich = Launcher.named("MPICH")
    job = signalled(mpich, tmp_path, number, "workers", ranks=0, group=True)
    assert job.returncode == 42, job.output
    assert job.stderr.count("\n") == 1, job.output
    assert f"{number.name} has come: saved" in job.stderr


@pytest.mark.slow  # tests/mpi/test_preemption.py has steps, and leaves, in every run
def test_the_loader_of_a_program_without_run_leaves(tmp_path: Path) -> None:
    """Inside `replica()`, at next(loader), which is all that the program calls; it goes on with the same bits."""
    mpich = Launcher.named("MPICH")
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    disturbed.mkdir()
    undisturbed.mkdir()
    job = signalled(mpich, disturbed, signal.SIGTERM, "replica", ranks=RANKS)
    assert job.returncode == 42, job.output
    assert "SIGTERM has come: saved" in job.stderr
    left_together(job, disturbed)
    last = steps_done(disturbed, RANKS) + 4
    for folder, ways in ((disturbed, ("replica",)), (undisturbed, ())):
        done = mpich.run_python(RANKS, PROGRAM, folder, str(last), "0", *ways, seconds=100.0)
        assert done.returncode == 0, done.output
    assert check_resumed(disturbed, RANKS, 2, undisturbed) == 0


def left_together(job: Job, folder: Path) -> None:
    """All after the same step, and nothing of what notices ranks that fail has said a word."""
    starts = starts_of(folder, RANKS)
    assert starts == [starts[0]] * RANKS
    ours = [line for line in job.stderr.splitlines() if line.startswith("mpistrat: ")]
    ours.remove("mpistrat: 2 ranks on 1 node; a global batch of 12 is 2 x 6")  # of the first step
    assert len(ours) == 1, job.output
    assert "Traceback" not in job.output


EARLY = """
import signal, sys, time
from pathlib import Path
import mpistrat as ms
own = []
signal.signal(signal.SIGUSR2, lambda number, _: own.append(number))
strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
with strategy.scope():
    variable = ms.Variable(0.0)
signal.raise_signal(signal.SIGUSR2)
assert own == [signal.SIGUSR2]
folder = Path(sys.argv[1])
(folder / f"ready{strategy.rank}").touch()
time.sleep(1)  # it reads its data, and is signalled
checkpoint = ms.checkpoint.Checkpoint(variable=variable)
handler = ms.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, folder)
while True:
    handler.run(strategy.run, lambda: None)
"""


def test_a_signal_before_there_is_a_handler(launcher: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(EARLY)
    job, _ = signalled_jobs.signalled(
        launcher, tmp_path, [program], signal.SIGUSR1, "launcher", ranks=RANKS
    )
    assert job.returncode == 42, job.output
    assert "SIGUSR1 has come: saved" in job.stderr
    assert "after 1 steps" in job.stderr, job.output
