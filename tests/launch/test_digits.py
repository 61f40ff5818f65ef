"""The digits example: the same training on any number of ranks, and a picture at the end."""

import re
import sys
from pathlib import Path

import pytest

from mpi_launcher import Job, Launcher, run_job

TRAIN = Path(__file__).parents[2] / "scripts" / "train_digits.py"


def losses(job: Job) -> list[float]:
    assert job.returncode == 0, job.output
    return [float(loss) for loss in re.findall(r"^epoch .* loss ([0-9.]+)", job.stdout, re.M)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one")
    command = [sys.executable, str(TRAIN), "--out", str(folder / "curve.png")]
    return losses(run_job(command, Launcher.named("MPICH").environment(), seconds=100))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_follow_one_process(
    launcher: Launcher, tmp_path: Path, one_rank: list[float], ranks: int
) -> None:
    """Global batches make the curve independent of the ranks; rounding grows a little from step to step."""
    job = launcher.run_python(ranks, TRAIN, "--out", tmp_path / "curve.png", seconds=120)
    curve = losses(job)
    assert len(curve) == 12
    assert curve[:3] == pytest.approx(one_rank[:3], rel=2e-3, abs=2e-4)
    assert curve[-1] < 0.02
    assert float(re.findall(r"Test accuracy ([0-9.]+)", job.stdout)[0]) >= 0.97
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert job.output.count("samples/s") == len(curve)  # rank 0 alone writes
    assert job.left_behind == ()


@pytest.mark.parametrize(
    "wire", [["--wire-dtype", "bfloat16"], ["--wire-dtype", "float16"], ["--top-k", "0.05"]]
)
def test_wire_formats_converge(tmp_path: Path, wire: list[str]) -> None:
    """Over two made-up nodes, where gradients cross in fewer bytes."""
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2", "OMP_NUM_THREADS": "1"}
    arguments = (*wire, "--out", tmp_path / "curve.png")
    job = Launcher.named("MPICH").run_python(2, TRAIN, *arguments, env=environment, seconds=120)
    assert losses(job)[-1] < 0.02
    assert float(re.findall(r"Test accuracy ([0-9.]+)", job.stdout)[0]) >= 0.97


def test_too_little_training_is_a_failure(tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--lr", "1e-6", "--out", str(tmp_path / "curve.png")]
    environment = Launcher.named("MPICH").environment()
    job = run_job([sys.executable, str(TRAIN), *arguments], environment, seconds=60)
    assert job.returncode != 0
    assert "That is below the 0.97 that is expected." in job.stderr
