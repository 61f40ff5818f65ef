"""One script for all ranks of a job with parameter servers: who goes on with it, and how it ends."""

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.signalled_jobs import signalled
from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.waits

PROGRAM = Path(__file__).parent / "programs" / "remote_variables.py"


def run(
    launcher: Launcher, folder: Path, name: str, ranks: int = 4, env: Mapping[str, str] = {}
) -> Job:
    shared = set(Path("/dev/shm").iterdir())
    job = launcher.run_python(ranks, PROGRAM, name, folder, env=env)
    assert job.left_behind == ()
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - shared}
    assert not [name for name in left if "mpistrat" in name]
    return job


@pytest.mark.parametrize(
    ("name", "goes_on"),
    [("trains", {0, 1, 2}), ("forgets", {0, 1, 2}), ("coordinates", {0})],
)
def test_who_goes_on_with_the_program(launcher, tmp_path: Path, name: str, goes_on) -> None:
    job = run(launcher, tmp_path, name)
    assert job.returncode == 0, job.output
    assert {int(rank) for rank in re.findall(r"rank (\d): after", job.stdout)} == goes_on
    assert job.stderr == ""


def test_a_chief_that_does_not_join_tells_what_was_not_executed(launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "does_not_join")
    assert job.returncode == 0, job.output
    assert job.stdout == "rank 0: after\n"
    (line,) = job.stderr.splitlines()
    warning = re.search(r"without ClusterCoordinator.join\(\): .* (\d+) were not executed", line)
    assert warning is not None, line
    assert 30 < int(warning[1]) <= 48  # of 50; two workers have begun with one each


def test_a_worker_that_raises_ends_the_job(launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "worker_raises")
    assert job.returncode != 0
    assert job.output.count("\nKeyError: 'on this worker only'\n") == 1
    assert job.seconds < 40


def test_an_uncaught_error_of_a_server_ends_the_job(launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "server_fails")
    assert job.returncode != 0
    assert "ZeroDivisionError: in the server" in job.output
    assert job.seconds < 40


def test_the_exit_code_of_the_chief(launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "chief_exits")
    assert job.returncode == 3, job.output


def test_the_chief_decides_what_an_interruption_does(launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "is_interrupted")
    assert job.returncode == 0, job.output
    assert job.stdout == "rank 0: interrupted\nrank 0: value 6.0\n"
    assert job.stderr == ""


@pytest.mark.parametrize("name", ["idle_beside_a_function", "idle_beside_a_long_step"])
@pytest.mark.parametrize(("shared", "most"), [({}, 0.1), ({"MPISTRAT_SHARED_MB": "0"}, 0.3)])
def test_who_waits_takes_no_time(launcher, tmp_path: Path, name: str, shared, most: float) -> None:
    """Through MPI, as between nodes, it looks for messages now and then."""
    job = run(launcher, tmp_path, name, env=shared)
    assert job.returncode == 0, job.output
    seconds = dict(re.findall(r"rank (\d): idle (\S+)", job.stdout))
    assert sorted(seconds) == ["0", "1", "2", "3"], job.output
    assert max(map(float, seconds.values())) < most, seconds  # of 2 s


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_servers", "nothing tells which ranks are parameter servers: give num_ps="),
        ("too_few", "num_ps=7 needs 9 ranks or more"),
        ("wrong_number", "num_ps=0 must be the number of parameter servers, 1 or more"),
    ],
)
def test_bad_arguments(launcher, tmp_path: Path, name: str, message: str) -> None:
    job = run(launcher, tmp_path, name, ranks=3)
    assert job.returncode != 0
    assert message in job.output
    assert job.seconds < 40


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("told_to_coordinate", {(2, "chief 0", 20)}),
        ("told_to_train", {(1, "worker 1", 3), (2, "chief 0", 3), (3, "worker 0", 3)}),
    ],
)
def test_tf_config_tells_each_rank_its_task(launcher, tmp_path: Path, name: str, seen) -> None:
    """In another order than that of ranks."""
    job = run(launcher, tmp_path, name)
    assert job.returncode == 0, job.output
    said = re.findall(r"rank (\d): (\w+ \d) sees (\d+)", job.stdout)
    assert {(int(rank), task, int(value)) for rank, task, value in said} == seen, job.output
    assert job.stderr == ""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "two_chiefs",
            "ValueError: the cluster has 2 tasks of type 'chief', expected at most one",
        ),
        ("two_ranks_are_chief", "TopologyError: ranks 2 and 3 are both chief 0 (told by TFConfig"),
    ],
)
def test_two_chiefs(launcher, tmp_path: Path, name: str, error: str) -> None:
    job = run(launcher, tmp_path, name)
    assert job.returncode != 0
    assert {rank for rank in range(4) if f"rank {rank}: {error}" in job.stdout} == {0, 1, 2, 3}
    assert job.seconds < 40


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("works", "launcher"),
        ("works", "pid3"),  # the server
        ("schedules", "launcher"),
        ("schedules", "pid0"),  # the chief, which waits
    ],
)
def test_sigterm_ends_the_job(launcher, tmp_path: Path, name: str, to: str) -> None:
    job, seconds = signalled(
        launcher, tmp_path, [PROGRAM, name], signal.SIGTERM, to, ranks=4, ready=3
    )
    assert job.returncode != 0, job.output
    assert seconds < 20, job.output


def test_without_a_launcher(tmp_path: Path) -> None:
    launcher = Launcher.named("MPICH")

    def python(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROGRAM), name, str(tmp_path)]
        environment = launcher.environment()
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert python("alone").stdout == "rank 0: value 2.0\n" * 2
    failed = python("no_servers")
    assert failed.returncode != 0
    assert "nothing tells which ranks are parameter servers: give num_ps=" in failed.stderr
