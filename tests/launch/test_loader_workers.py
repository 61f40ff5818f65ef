"""Worker processes of a DataLoader beside MPI: they never knew MPI, and what goes wrong with them is said."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher
from support.last_lines import assert_mended_by, assert_short

PROGRAM = Path(__file__).parent / "programs" / "loader_workers.py"


def run(launcher: Launcher, case: str) -> Job:
    """A worker of torch's looks every 5 s whether its rank, which the launcher kills, still lives."""
    job = launcher.run_python(2, PROGRAM, case, seconds=90, forked=True, gone_within=8.0)
    assert job.left_behind == (), job.output
    return job


UNDER_BOTH_MPIS = pytest.mark.both_mpis("launching")


@pytest.mark.parametrize(
    "case", [pytest.param("forkserver", marks=UNDER_BOTH_MPIS), "persistent", "iterable"]
)
def test_workers_read_everything_once(launcher: Launcher, case: str) -> None:
    job = run(launcher, case)
    assert job.returncode == 0, job.output
    assert job.stdout.count("read everything") == 2


def test_fork_is_the_users_choice(launcher: Launcher) -> None:
    job = run(launcher, "fork")
    assert job.returncode == 0, job.output
    assert job.stdout.count("read everything") == 2


def test_what_cannot_be_sent_to_a_worker_is_named(launcher: Launcher) -> None:
    job = run(launcher, "lambda")
    assert job.returncode != 0
    assert "TypeError: the DataLoader's collate_fn cannot be sent to its 1 worker" in job.output
    assert "no lambda" in job.output
    assert_mended_by(
        job.stderr, r"\S+:\d+ in .* \(.*Define functions and classes at the top level.*"
    )


@pytest.mark.parametrize("case", [pytest.param("no guard", marks=UNDER_BOTH_MPIS), "strategy"])
def test_a_strategy_in_a_worker(launcher: Launcher, case: str) -> None:
    job = run(launcher, case)
    assert job.returncode != 0
    says = job.output.count("in a worker process (pid ")
    assert says == 1 if case == "no guard" else says > 0, job.output
    assert "resource_tracker" not in job.output, job.output
    assert 'if __name__ == "__main__":' in job.output
    if case == "no guard":
        advice = 'put what it does under `if __name__ == "__main__":`'
        assert_mended_by(job.stderr, rf"\S+:\d+ in main \(rank \d\): .*{advice}")
        assert_short(job.stderr)
