"""An error that ranks have in common is printed once, with all their numbers; others are not lost, nor late."""

import re
import sys
from pathlib import Path

import pytest

from support.clusters.slurm_cluster import SlurmCluster
from support.harness.mpi_launcher import Job, Launcher
from support.last_lines import assert_mended_by

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

PROGRAM = Path(__file__).parent / "programs" / "failing.py"
SECONDS = 10.0  # the start of the ranks, too


def failed(
    launcher: Launcher, folder: Path, name: str, ranks: int, code: int = 1, **env: str
) -> Job:
    job = launcher.run_python(ranks, PROGRAM, name, folder, env=env)
    assert job.returncode == code, job.output
    assert job.seconds < SECONDS, job.output
    assert job.left_behind == ()
    return job


@pytest.mark.quick
def test_of_all_ranks(launcher: Launcher, tmp_path: Path) -> None:
    job = failed(launcher, tmp_path, "all_with_strategy", 4)
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert job.stderr.count("\nValueError: wrong on rank ") == 1
    assert job.stderr.count("mpistrat: the same error on ranks 0-3\n") == 1
    assert_mended_by(job.stderr, rf"{PROGRAM}:\d+ in fail \(rank \d\): wrong on rank \d")


def test_two_errors(launcher: Launcher, tmp_path: Path) -> None:
    """Before MPI runs. They are raised at one line, so one traceback shows the way to it."""
    job = failed(launcher, tmp_path, "two", 4)
    for error in ("an even error", "an odd error"):
        assert job.stderr.count(f"ValueError: {error}\n") == 1, job.stderr
    assert job.stderr.count(") failed at the same line: ValueError: ") == 1
    for first, ranks in (("[02]", "0, 2"), ("[13]", "1, 3")):
        assert re.search(rf"mpistrat: the error of rank {first}: on ranks {ranks}\n", job.stderr)
    assert_mended_by(job.stderr, rf"{PROGRAM}:\d+ in fail \(.*an (odd|even) error")


def test_the_whole_tracebacks(launcher: Launcher, tmp_path: Path) -> None:
    job = failed(launcher, tmp_path, "two", 4, MPISTRAT_TRACEBACK="full")
    assert job.stderr.count("Traceback") == 2, job.stderr


def test_of_one_rank_while_the_others_hang(launcher: Launcher, tmp_path: Path) -> None:
    job = failed(launcher, tmp_path, "one_with_strategy", 3)
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert job.stderr.count("\nValueError: wrong alone\n") == 1
    assert "the same error" not in job.stderr
    assert_mended_by(job.stderr, rf"{PROGRAM}:\d+ in fail \(rank 1\): wrong alone")


def test_interrupted_twice(launcher: Launcher, tmp_path: Path) -> None:
    job = failed(launcher, tmp_path, "interrupted_with_strategy", 3, code=130)
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert job.stderr.count("time.sleep(60)  # here\n") == 1
    assert job.stderr.count("mpistrat: the same error on ranks 0-2\n") == 1


def test_no_mpi_library(launcher: Launcher, tmp_path: Path) -> None:
    """The error is shown once, and the last line repeats its cause."""
    job = failed(launcher, tmp_path, "without_mpi", 2, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert job.stderr.count("TopologyError: MPI4PY_LIBMPI=/nowhere/libmpi.so cannot") == 1, (
        job.stderr
    )
    assert job.stderr.count("\nmpistrat.errors.TopologyError: ") == 1
    assert job.stderr.count("mpistrat: the same error on ranks 0-1\n") == 1
    assert_mended_by(
        job.stderr, rf"{PROGRAM}:\d+ in <module> \(rank \d\): MPI4PY_LIBMPI=/nowhere/.+"
    )


@pytest.mark.slurm
def test_on_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    mpich = Launcher.named("MPICH")
    for name in ("all", "by_node"):
        (tmp_path / name).mkdir()
    command = ["-N2", "-n4", "--ntasks-per-node=2", "--mpi=pmi2", sys.executable, PROGRAM]
    job = slurm.srun(mpich, *command, "all_with_strategy", tmp_path / "all")
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert job.stderr.count("mpistrat: the same error on ranks 0-3\n") == 1, job.stderr
    job = slurm.srun(mpich, *command, "by_node_with_strategy", tmp_path / "by_node")
    for error, first, ranks in (("first", "[01]", "0-1"), ("second", "[23]", "2-3")):
        assert job.stderr.count(f"ValueError: of the {error} node\n") == 1
        assert re.search(rf"mpistrat: the error of rank {first}: on ranks {ranks}\n", job.stderr)
