"""A person reads the last lines first: they name what to mend. `assert_mended_by` is asked in other files, too."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher
from support.last_lines import assert_mended_by, assert_short

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
    if name != "untold":
        assert_short(job.stderr)
    if name != "operand":
        assert job.stderr.count(f"\nFileNotFoundError: {text}\n") == 1, job.stderr


MISTAKES = {
    "DDP": ("main", ".* is put around a Linear .* Leave DistributedDataParallel out, and .*"),
    "shards": ("main", "rank 3 of 4 has no data .* Give each rank data: .*"),
    "worker": (
        "main",
        ".* worker process has died .* With num_workers=0 this rank reads the data itself, .*",
    ),
    "hook": ("wrong_hook", "no such layer"),
    "files": ("main", r"\[Errno 2\] No such file or directory: '/scratch/me/shard-\d.tar'"),
}


@pytest.mark.waits
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_all_ranks(name: str) -> None:
    """An error has one traceback, also where each rank has a file of its own. It has no frames of torch."""
    job = Launcher.named("Open MPI").run_python(4, PROGRAM, name, forked=True)
    function, text = MISTAKES[name]
    place = rf"{PROGRAM}:{line_of(name)} in {function} \(rank \d\)"
    assert_mended_by(job.stderr, f"{place}: {text}")
    assert_short(job.stderr)
    for rank in range(4) if name == "files" else ():
        assert f": '/scratch/me/shard-{rank}.tar'\n" in job.stderr, job.stderr


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
