"""A program that forgets `scope()` and `run` hears that its ranks train apart; others hear nothing."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import MPI_NAMES, Launcher

PROGRAM = Path(__file__).parent / "programs" / "stepping_apart.py"


@pytest.mark.parametrize("first", ["nothing", "all"])
def test_steps_of_a_local_model(tmp_path: Path, first: str) -> None:
    """Without a strategy of several ranks, with servers, beside a mirrored model; then what is forgotten."""
    launcher = Launcher.named(MPI_NAMES[0])
    job = launcher.run_python(3, PROGRAM, first, cwd=tmp_path, seconds=60, forked=True)
    assert job.returncode == 0, job.output
    warned = [line.split(": ") for line in job.stdout.splitlines() if line.endswith("warnings")]
    assert len(warned) == (2 if first == "nothing" else 7), job.output
    forgotten = "MultiWorkerMirroredStrategy(3 replicas)"
    for what, number in warned:
        assert number == f"{int(what == f'{forgotten} forgotten')} warnings", job.output
    assert job.output.count(f"each of the 3 ranks of {forgotten} trains a model of its own") == 1
    assert f"at {PROGRAM}" in job.output
