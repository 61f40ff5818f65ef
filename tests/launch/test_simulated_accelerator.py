"""Training on the simulated accelerator: the CPU's numbers, bit for bit, and nothing out of order."""

from pathlib import Path

import pytest

from support.clusters import two_nodes
from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.usefixtures("simulated_accelerator")

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "launch/programs/simulated_accelerator.py"
SAME = [
    *("digits", "batch norm", "mixed precision", "deterministic", "input prefetch"),
    *("checkpoint", "preemption"),
]


def check(job: Job) -> None:
    assert job.returncode == 0, job.output
    lines = job.stdout.splitlines()
    assert [line.removeprefix("same ") for line in lines if line.startswith("same ")] == SAME


EACH_HAS_ONE = {"SIMULATED_DEVICES": "1", "MPISTRAT_ON_DRIFT": "raise"}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_one_node(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    job = launcher.run_python(ranks, PROGRAM, tmp_path, env=EACH_HAS_ONE, forked=True)
    check(job)
    assert job.stdout.count("no wait of the host") == 3, job.stdout


@pytest.mark.long(
    "Four ranks share the cores, and train seven times by each of two kinds of device."
)
@pytest.mark.time_limit(240)
@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_on_two_nodes(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    with two_nodes.two_nodes(tmp_path) as nodes:
        check(
            nodes.run_python(launcher, ranks // 2, PROGRAM, tmp_path, env=EACH_HAS_ONE, seconds=180)
        )
