"""A person reads the last lines first: they name what to mend. `assert_mended_by` is asked in other files, too."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher
from support.last_lines import assert_mended_by

PROGRAM = Path(__file__).parent / "programs" / "last_lines.py"
RANKS = 3


def line_of(mark: str) -> int:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# mend {mark}"))


def check(launcher: Launcher, name: str) -> None:
    env = {"MPISTRAT_STALL_SECONDS": "1"}
    job = launcher.run_python(RANKS, PROGRAM, name, env=env, forked=True)
    assert job.returncode != 0, job.output
    assert job.left_behind == ()
    place = f"{PROGRAM}:{line_of('dataset')} in __getitem__"
    text = "no such file: /scratch/23.npy"
    if name == "operand":
        place, text = f"{PROGRAM}:{line_of(name)} in main", ".*"
    assert_mended_by(job.stderr, rf"{place} \(rank 2\): {text}", stalled=name == "untold")
    if name != "operand":
        assert job.stderr.count(f"\nFileNotFoundError: {text}\n") == 1, job.stderr


@pytest.mark.both_mpis("faults")
@pytest.mark.waits
@pytest.mark.parametrize("name", ["training", "the others are through"])
def test_an_error_of_a_dataset_on_one_rank(launcher: Launcher, name: str) -> None:
    check(launcher, name)


@pytest.mark.waits
@pytest.mark.parametrize("name", ["training with workers", "operand", "untold"])
def test_an_error_of_one_rank(name: str) -> None:
    """Untold is an error whose rank has to wait for others until that is a stall."""
    check(Launcher.named("MPICH"), name)
