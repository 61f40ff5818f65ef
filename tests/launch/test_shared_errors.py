"""An error that ranks have in common is printed once, with all their numbers; others are not lost, nor late."""

import re
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

PROGRAM = Path(__file__).parent / "programs" / "failing.py"
SECONDS = 10.0  # the start of the ranks, too


def failed(launcher: Launcher, name: str, ranks: int, **env: str) -> Job:
    job = launcher.run_python(ranks, PROGRAM, name, env=env)
    assert job.returncode == 1, job.output
    assert job.seconds < SECONDS, job.output
    assert job.left_behind == ()
    return job


@pytest.mark.quick
def test_of_all_ranks(launcher: Launcher) -> None:
    job = failed(launcher, "all_with_strategy", 4)
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert job.stderr.count("\nValueError: wrong on rank ") == 1
    assert job.stderr.count("mpistrat: the same error on ranks 0-3\n") == 1


def test_two_errors(launcher: Launcher) -> None:
    """Before MPI runs."""
    job = failed(launcher, "two", 4)
    for error in ("an even error", "an odd error"):
        assert job.stderr.count(f"\nValueError: {error}\n") == 1, job.stderr
    assert job.stderr.count("Traceback") == 2
    for first, ranks in (("[02]", "0, 2"), ("[13]", "1, 3")):
        assert re.search(rf"mpistrat: the error of rank {first}: on ranks {ranks}\n", job.stderr)


def test_of_one_rank_while_the_others_hang(launcher: Launcher) -> None:
    job = failed(launcher, "one_with_strategy", 3)
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert job.stderr.count("\nValueError: wrong alone\n") == 1
    assert "the same error" not in job.stderr


def test_no_mpi_library(launcher: Launcher) -> None:
    """What to do about it is said once."""
    job = failed(launcher, "without_mpi", 2, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert job.stderr.count("/nowhere/libmpi.so cannot be used") == 1, job.stderr
    assert job.stderr.count("\nmpistrat.errors.TopologyError: ") == 1
    assert job.stderr.count("mpistrat: the same error on ranks 0-1\n") == 1
