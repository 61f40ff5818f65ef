"""The digits example: the same training on any number of ranks, and a picture at the end."""

import re
import sys
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher, run_job

TRAIN = Path(__file__).parents[2] / "scripts" / "train_digits.py"
PARAMETERS = 151_306  # of its model
ACCURACY_WITHIN = 0.012  # of that with float32: 4 of 360 scans


def losses(job: Job) -> list[float]:
    assert job.returncode == 0, job.output
    return [float(loss) for loss in re.findall(r"^epoch .* loss ([0-9.]+)", job.stdout, re.M)]


def accuracy(job: Job) -> float:
    assert job.returncode == 0, job.output
    return float(re.findall(r"Test accuracy ([0-9.]+)", job.stdout)[0])


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("one")
    command = [sys.executable, str(TRAIN), "--out", str(folder / "curve.png")]
    return losses(run_job(command, Launcher.named("MPICH").environment(), seconds=100))


@pytest.mark.long(
    "One rank and then several train for an epoch, until the accuracy can be compared."
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_follow_one_process(
    launcher: Launcher, tmp_path: Path, one_rank: list[float], ranks: int
) -> None:
    """Global batches make the curve independent of the ranks; rounding grows a little from step to step."""
    job = launcher.run_python(
        ranks, TRAIN, "--out", tmp_path / "curve.png", seconds=120, forked=True
    )
    curve = losses(job)
    assert len(curve) == 12
    assert curve[:3] == pytest.approx(one_rank[:3], rel=2e-3, abs=2e-4)
    assert curve[-1] < 0.02
    assert accuracy(job) >= 0.97
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert job.output.count("samples/s") == len(curve)  # rank 0 alone writes
    assert job.left_behind == ()


def over_two_nodes(folder: Path, *wire: str) -> Job:
    """Made-up ones, of a rank each."""
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2", "OMP_NUM_THREADS": "1"}
    arguments = (*wire, "--explain", "--out", folder / "curve.png")
    return Launcher.named("MPICH").run_python(
        2, TRAIN, *arguments, env=environment, seconds=120, forked=True
    )


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return over_two_nodes(tmp_path_factory.mktemp("float32"))


@pytest.mark.parametrize(
    ("wire", "description"),
    [
        pytest.param(  # tests/launch/test_text.py shows it, too
            *(("--wire-dtype", "bfloat16"), "ShortFloats(dtype='bfloat16')"),
            marks=pytest.mark.slow,
        ),
        (("--wire-dtype", "float16"), "ShortFloats(dtype='float16')"),
        (("--top-k", "0.05"), "TopK(fraction=0.05)"),
    ],
)
@pytest.mark.long("Two ranks train twice, until the accuracy can be compared.")
def test_wire_formats_converge(
    tmp_path: Path, float32: Job, wire: tuple[str, str], description: str
) -> None:
    """As float32 does, while gradients cross between nodes in fewer bytes."""
    job = over_two_nodes(tmp_path, *wire)
    crossed = f"cross the network as {description}: up to {PARAMETERS:,} values of a backward()"
    assert crossed in job.stdout, job.output
    assert "cross the network as" not in float32.stdout
    assert losses(job)[-1] < 0.02
    found, expected = accuracy(job), accuracy(float32)
    print(f"accuracy {found} of {expected} with float32")
    assert abs(found - expected) <= ACCURACY_WITHIN, (found, expected)


def test_too_little_training_is_a_failure(tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--lr", "1e-6", "--out", str(tmp_path / "curve.png")]
    environment = Launcher.named("MPICH").environment()
    job = run_job([sys.executable, str(TRAIN), *arguments], environment, seconds=60)
    assert job.returncode != 0
    assert "That is below the 0.97 that is expected." in job.stderr
