"""A job never hangs on its own mistakes: real programs that fail, leave early, or are interrupted, under either MPI."""

import re
import signal
import time
from pathlib import Path

import pytest

from launch.fault_jobs import HOST_AND_PID
from launch.signalled_jobs import signalled
from support.harness.mpi_launcher import Job, Launcher
from support.last_lines import assert_mended_by

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

PROGRAM = Path(__file__).parent / "programs" / "endings.py"
SECONDS = 5.0


def run(launcher: Launcher, folder: Path, name: str, ranks: int = 3) -> tuple[Job, float]:
    """The finished job, and how long it went on after the event, if its program named one."""
    job = launcher.run_python(ranks, PROGRAM, name, folder)
    event = folder / "event"
    seconds = time.time() - float(event.read_text()) if event.exists() else 0.0
    assert job.left_behind == ()
    return job, seconds


def ended(launcher: Launcher, folder: Path, name: str, code: int, ranks: int = 3) -> str:
    """The output of a job that must be ended."""
    job, seconds = run(launcher, folder, name, ranks)
    assert job.returncode == code, job.output
    assert seconds < SECONDS, job.output
    assert "job_end.py" not in job.output  # no traceback of our own
    return job.output


def finished(launcher: Launcher, folder: Path, name: str, ranks: int = 3) -> Job:
    """A job that must be let alone, and says nothing."""
    job, _ = run(launcher, folder, name, ranks)
    assert job.returncode == 0, job.output
    assert job.stderr == ""
    return job


@pytest.mark.quick
def test_an_uncaught_exception(launcher: Launcher, tmp_path: Path) -> None:
    output = ended(launcher, tmp_path, "raises", 1)
    assert re.search(rf"mpistrat: rank 1 of 3{HOST_AND_PID} failed; ending the job\nTrace", output)
    assert re.search(r'File ".*endings.py", line \d+, in raises\n', output)
    assert output.count("\nValueError: wrong on this rank only\n") == 1
    assert_mended_by(output, r"\S+:\d+ in raises \(rank 1\): wrong on this rank only")


def test_an_uncaught_exception_while_the_others_compute(launcher: Launcher, tmp_path: Path) -> None:
    output = ended(launcher, tmp_path, "raises_while_others_work", 1)
    assert "mpistrat: rank 2 of 3" in output


def test_an_uncaught_mismatch(launcher: Launcher, tmp_path: Path) -> None:
    output = ended(launcher, tmp_path, "mismatch", 1)
    assert output.count("CollectiveMismatchError: the ranks did not call the same collective") == 1
    assert "rank 1: all_reduce(sum, float64, (4,))" in output
    assert_mended_by(
        output,
        r"\S+:\d+ in mismatch \(rank \d\): the ranks did not call the same collective .*",
    )


def test_an_excepthook_of_the_user_s_prints(launcher: Launcher, tmp_path: Path) -> None:
    output = ended(launcher, tmp_path, "earlier_hook", 1)
    assert "failed; ending the job\nHOOK wrong on this rank only\n" in output
    assert "Traceback" not in output


def test_an_excepthook_that_replaces_ours(launcher: Launcher, tmp_path: Path) -> None:
    output = ended(launcher, tmp_path, "later_hook", 1)
    assert "HOOK wrong on this rank only\n" in output
    assert re.search(rf"rank 1 of 3{HOST_AND_PID} failed with ValueError: wrong on", output)


def test_without_thread_multiple(launcher: Launcher, tmp_path: Path) -> None:
    """Leaving early is not noticed then, which is said once; exceptions end the job all the same."""
    output = ended(launcher, tmp_path, "serialized", 1)
    assert "rank 0: ['MPI was started without MPI_THREAD_MULTIPLE: " in output
    assert "rank 2: []\n" in output
    assert "mpistrat: rank 1 of 3" in output


LEFT = {
    # the rank that left, how, the ranks that may wait for it, the collective, and how many came before
    "last_rank_leaves": (
        2,
        r"called sys.exit\(0\) at \S+ in last_rank_leaves",
        "01",
        "barrier()",
        5,
    ),
    "first_rank_leaves": (0, r"called sys.exit\(0\) at \S+ in \w+", "12", "barrier()", 5),
    "end_of_script": (2, "came to its end", "01", "all_reduce(sum, float64, (7,), late)", 5),
    "leaves_a_split": (3, r"called sys.exit\(0\)", "2", "barrier()", 1),
    "leaves_while_others_raise_together": (
        2,
        r"called sys.exit\(0\)",
        "01",
        "raised ValueError",
        5,
    ),
    "some_ranks_only": (1, r"called sys.exit\(0\)", "02", "barrier()", 5),
    "larger_group_later": (1, r"called sys.exit\(0\)", "023", "barrier()", 5),
    "leaves_by_finalize": (2, "came to its end", "01", "barrier()", 5),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("last_rank_leaves", marks=pytest.mark.quick),
        "first_rank_leaves",
        "end_of_script",
        "leaves_a_split",
        pytest.param("leaves_while_others_raise_together", marks=pytest.mark.slow),
        "some_ranks_only",
        pytest.param("larger_group_later", marks=pytest.mark.slow),
        "leaves_by_finalize",
    ],
)
def test_a_rank_that_leaves_early(launcher: Launcher, tmp_path: Path, name: str) -> None:
    left, how, waiting, collective, before = LEFT[name]
    size = 4 if name == "leaves_a_split" else 3
    output = ended(launcher, tmp_path, name, 1, size)
    assert re.search(
        rf"mpistrat: ending the job: rank {left} of {size}{HOST_AND_PID} {how}.*"
        r", but another rank waits for it in a collective.\n"
        rf"  rank {left}: left after collective number {before}\n"
        rf"  rank [{waiting}] of {size}{HOST_AND_PID}: in collective number {before + 1}, "
        rf"{re.escape(collective)}\n      at \S+endings.py:\d+ in {name}\n",
        output,
    ), output
    if name == "last_rank_leaves":
        assert "printed before" in output  # though nobody flushed it


def test_a_rank_that_works_on_after_the_others(launcher: Launcher, tmp_path: Path) -> None:
    job = finished(launcher, tmp_path, "works_on")
    assert job.stdout == "results written\n"
    assert job.seconds > 4


def test_a_failing_exit(launcher: Launcher, tmp_path: Path) -> None:
    output = ended(launcher, tmp_path, "exits_with_3", 3)
    assert re.search(r"rank 1 of 3.* called sys.exit\(3\) .* 2 of 3 ranks still worked", output)


def test_a_failing_exit_of_all(launcher: Launcher, tmp_path: Path) -> None:
    output = ended(launcher, tmp_path, "all_exit_with_3", 3)
    assert "mpistrat" not in output


@pytest.mark.slow
def test_an_exit_that_was_caught(launcher: Launcher, tmp_path: Path) -> None:
    finished(launcher, tmp_path, "caught_exit")


def test_children_end_alone(launcher: Launcher, tmp_path: Path) -> None:
    job, _ = run(launcher, tmp_path, "children", 2)
    assert job.returncode == 0, job.output
    assert job.stdout.count("children done") == 2
    assert "mpistrat: " not in job.output


def test_a_program_that_finalizes_mpi(launcher: Launcher, tmp_path: Path) -> None:
    job = finished(launcher, tmp_path, "finalizes")
    assert job.stdout.count("finalized") == 3


def test_a_program_that_ends_in_mid_epoch_ends_quietly(launcher: Launcher, tmp_path: Path) -> None:
    """Python drops the iterator when modules have no names left."""
    (tmp_path / "program.py").write_text(
        "import torch, mpistrat as ms\nstrategy = ms.MultiWorkerMirroredStrategy()\n"
        "loader = torch.utils.data.DataLoader(torch.arange(8.0), 4)\n"
        "iterator = iter(strategy.experimental_distribute_dataset(loader))\nnext(iterator)\n"
    )
    job = launcher.run_python(2, tmp_path / "program.py")
    assert job.returncode == 0, job.output
    assert "Exception ignored" not in job.output, job.output


def test_pytest_ends_normally(launcher: Launcher, tmp_path: Path) -> None:
    """A failing test, and a test that catches an exit, are no failures of a rank."""
    (tmp_path / "test_it.py").write_text(
        "import sys, pytest, time\nfrom mpi4py import MPI\n"
        "from mpistrat.communicators.construction import communicator_for\n"
        "ours = communicator_for(MPI.COMM_WORLD)\n"
        "def test_one():\n    ours.barrier()\n    assert False\n"
        "def test_two():\n    ours.barrier()\n    with pytest.raises(SystemExit): sys.exit(3)\n"
        "def teardown_module():\n    if ours.rank == 0: time.sleep(2)\n"
    )
    job = launcher.run_python(
        2, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", ".", cwd=tmp_path
    )
    assert job.returncode == 1
    assert job.stdout.count("1 failed, 1 passed") == 2
    assert "mpistrat: " not in job.output


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "to", "program"),
    [
        pytest.param(signal.SIGINT, "launcher", "last_blocks", id="ctrl-c-all-blocked"),
        pytest.param(signal.SIGINT, "launcher", "last_sleeps", id="ctrl-c"),
        pytest.param(signal.SIGINT, "ready1", "last_blocks", id="interrupt-one-all-blocked"),
        pytest.param(signal.SIGINT, "ready1", "last_sleeps", id="interrupt-one", marks=SLOW),
        pytest.param(signal.SIGINT, "ready2", "last_blocks", id="interrupt-one-in-mpi"),
        pytest.param(signal.SIGTERM, "launcher", "last_blocks", id="terminate-all-blocked"),
        pytest.param(signal.SIGTERM, "launcher", "last_sleeps", id="terminate", marks=SLOW),
        pytest.param(signal.SIGTERM, "ready1", "last_blocks", id="terminate-one-all-blocked"),
        pytest.param(signal.SIGTERM, "ready2", "last_sleeps", id="terminate-one", marks=SLOW),
    ],
)
def test_a_signal_while_ranks_are_in_a_collective(
    launcher: Launcher, tmp_path: Path, number: signal.Signals, to: str, program: str
) -> None:
    job, seconds = signalled(launcher, tmp_path, [PROGRAM, program], number, to)
    assert job.returncode != 0, job.output
    assert seconds < SECONDS
    if (number, to) == (signal.SIGINT, "ready1"):
        assert job.returncode == 130
        # It waits in Python for the ranks of its node, and can be interrupted there.
        assert re.search(
            r"rank 1 of 3.* failed; ending the job\nTraceback[^$]*endings[^$]*\nKeyboardInterrupt",
            job.output,
        )
    if (number, to) == (signal.SIGINT, "ready2"):
        assert job.returncode == 130
        assert re.search(
            r"rank 2 of 3.* was interrupted, but stays in a call at \S+endings", job.output
        )


@pytest.mark.slow
def test_an_interrupt_that_the_program_handles(launcher: Launcher, tmp_path: Path) -> None:
    finished(launcher, tmp_path, "handles_interrupts")
