"""Under `mpistrat run`: an error inside a collective, and callbacks of futures that wait in vain."""

import re
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.waits

PROGRAM = Path(__file__).parent / "programs" / "errors_in_collectives.py"
TEXT = "MemoryError: no memory for 3 GB of messages"


def line_of(mark: str) -> int:
    lines = PROGRAM.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))


def failed(launcher: Launcher, folder: Path, ranks: int, name: str, limit: int) -> Job:
    env = {"MPISTRAT_STALL_SECONDS": f"{limit}"}
    words = ("-m", "mpistrat", "run", PROGRAM, name)
    job = launcher.run_python(ranks, *words, seconds=30, env=env, cwd=folder, forked=True)
    assert job.returncode != 0, job.output
    assert job.left_behind == (), job.output
    return job


@pytest.mark.both_mpis("faults")
def test_an_error_of_one_rank_after_all_have_agreed(launcher: Launcher, tmp_path: Path) -> None:
    """That rank gets it at once, those that wait for its part are told, in memory and inside MPI."""
    job = failed(launcher, tmp_path, 3, "left_by_an_error", 20)
    call = r"collective number \d+, all_reduce\(sum, float32, \(20000,\)\), for " + TEXT
    own = TEXT.replace("no memory ", "no memory\n")
    assert job.stdout.count(f"rank 0 got {own}\n") == 2, job.output
    assert re.search(rf"rank 1 got StallError: rank 0 of 2 left {call}", job.stdout), job.output
    place = rf"{PROGRAM.name}:{line_of('the sum')} in left_by_an_error"
    ended = rf"ending the job: rank 2 of 3 .* cannot raise StallError inside MPI, at \S+{place}:\n"
    assert re.search(rf"{ended}rank 0 of 2 left {call}\n", job.stderr), job.output


def test_a_callback_that_waits_in_vain(launcher: Launcher, tmp_path: Path) -> None:
    job = failed(launcher, tmp_path, 2, "waits_in_a_callback", 1)
    assert re.search(r"all ranks have come to it, but it does not end\n", job.stderr), job.output
    for mark in ("the first", "here"):
        place = f"{PROGRAM.name}:{line_of(mark)} in waits_in_a_callback"
        assert place in job.stderr, job.output
