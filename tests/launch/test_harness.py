"""The test harness itself, on tests that fail and hang on purpose."""

import json
import re
import shutil
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.both_mpis("faults")

TESTS = Path(__file__).parents[1]

HEADER = """
import os, time, sys, threading
import numpy as np, pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
"""


def run_tests(launcher: Launcher, folder: Path, body: str, ranks: int = 2, *arguments: str) -> Job:
    """Run a project of one test file under our conftest, and check that nothing is left running."""
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "test_it.py").write_text(HEADER + body)
    shutil.copy(TESTS.parent / "setup.cfg", folder)
    pytest_command = [
        "-m",
        "pytest",
        "-o",
        f"pythonpath={TESTS}",
        "--color=no",
        "--with-mpi",
        "test_it.py",
    ]
    job = launcher.run_python(
        ranks,
        *pytest_command,
        *arguments,
        cwd=folder,
        env={"MPISTRAT_TEST_OUTPUT": str(folder)},
    )
    assert job.left_behind == ()
    return job


def assert_stacks_of_all(job: Job, ranks: int) -> None:
    for rank in range(ranks):
        assert re.search(rf"-+ rank{rank} -+\n(failed with:(.|\n)*?)?Thread 0x", job.stderr), (
            job.output
        )


@pytest.mark.quick
def test_the_ranks_share_outcomes(launcher: Launcher, tmp_path: Path) -> None:
    body = """
def test_passes(): comm.Barrier()
def test_fails(): assert comm.rank != 2, "a reason to be seen"
def test_skips():
    if comm.rank == 1: pytest.skip("not me")
@pytest.fixture
def broken():
    if comm.rank == 1: raise OSError("no disk")
@pytest.fixture
def broken_at_the_end():
    yield
    if comm.rank == 1: raise OSError("no rest")
def test_needs_it(broken): comm.Barrier()
def test_leaves_it(broken_at_the_end): comm.Barrier()
@pytest.mark.mpi(min_size=4)
def test_four(): assert comm.size >= 4
def test_after(): comm.Barrier()
"""
    job = run_tests(launcher, tmp_path, body, ranks=3)
    assert job.returncode == 1
    assert job.output.count("test session starts") == 1
    assert job.stdout.count("2 failed, 3 passed, 1 deselected, 2 errors") == 1
    assert "failed on rank 2: AssertionError: a reason to be seen" in job.stdout
    assert "test_it.py:8: AssertionError" in job.stdout  # rank 2's own traceback
    assert "skipped on some ranks only: rank 1" in job.stdout
    assert "failed on rank 1: OSError: no disk" in job.stdout
    assert "failed on rank 1: OSError: no rest" in job.stdout


def test_different_tests_on_each_rank(launcher: Launcher, tmp_path: Path) -> None:
    body = """
@pytest.mark.parametrize("rank", [comm.rank])
def test_one(rank): comm.Barrier()
"""
    job = run_tests(launcher, tmp_path, body)
    assert job.returncode != 0
    assert "the ranks collected different tests" in job.output


def test_file_that_one_rank_cannot_import(launcher: Launcher, tmp_path: Path) -> None:
    body = """
if comm.rank == 1: raise ImportError("not here")
def test_one(): comm.Barrier()
"""
    job = run_tests(launcher, tmp_path, body)
    assert job.returncode != 0
    assert "rank 1: 0 tests, 1 errors" in job.output


def test_raise_while_the_others_reduce(launcher: Launcher, tmp_path: Path) -> None:
    body = """
def test_one():
    if comm.rank == 1: raise ValueError("wrong on rank 1 only")
    comm.Allreduce(MPI.IN_PLACE, np.ones(4))
"""
    job = run_tests(launcher, tmp_path, body, ranks=3)
    assert job.returncode != 0
    assert "HUNG: test_it.py::test_one: a rank failed" in job.stderr
    assert "ValueError: wrong on rank 1 only" in job.stderr
    assert_stacks_of_all(job, 3)
    assert job.stderr.count("in test_one") == 2  # the two that wait; the third is in its report
    assert job.seconds < 30


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_hang_shows_every_stack(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    body = """
def wait_for_nobody():
    time.sleep(1000)
@pytest.mark.time_limit(4)
def test_one():
    if comm.rank == comm.size - 1: wait_for_nobody()
    comm.Barrier()
"""
    job = run_tests(launcher, tmp_path, body, ranks)
    assert job.returncode != 0
    assert "HUNG: test_it.py::test_one: not finished after 4 s" in job.stderr
    assert_stacks_of_all(job, ranks)
    assert job.stderr.count("in wait_for_nobody") == 1
    assert job.seconds < 30


@pytest.mark.slow
def test_hang_that_holds_the_gil_everywhere(launcher: Launcher, tmp_path: Path) -> None:
    """No Python thread runs any more: the stacks stand in files, and SIGALRM ends the ranks."""
    body = """
import ctypes
@pytest.mark.time_limit(2)
def test_one(): ctypes.PyDLL(None).sleep(1000)
"""
    job = run_tests(launcher, tmp_path, body)
    assert job.returncode != 0
    stacks = [path.read_text() for path in tmp_path.glob("*/stacks-rank*.txt")]
    assert ["in test_one" in text for text in stacks] == [True, True]


def test_results_tell_what_a_dead_job_ran(launcher: Launcher, tmp_path: Path) -> None:
    body = """
def test_a(): pass
def test_b():
    if comm.rank == 1: os.kill(os.getpid(), 9)
    comm.Barrier()
def test_c(): pass
"""
    job = run_tests(launcher, tmp_path, body, 2, "--results", "lines")
    assert job.returncode != 0
    lines = (tmp_path / "lines").read_text().splitlines()
    outcomes = [json.loads(line)["outcome"] for line in lines]
    assert outcomes == ["started", "passed", "started"]

    rest = run_tests(launcher, tmp_path, body, 2, "--leave-out", "lines")
    assert rest.returncode == 0
    assert "1 passed, 2 deselected" in rest.stdout
