"""Gradients on simulated accelerators: see `programs/gradients_on_a_device.py`."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs/gradients_on_a_device.py"
BACKWARD = "        self.loss(self.model, inputs[RANK].to(DEVICE), RANK).backward()"

pytestmark = pytest.mark.usefixtures("simulated_accelerator")


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        (2, False),  # each rank has a device of its own, and sums go natively
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_gradients(launcher: Launcher, ranks: int, shared: bool) -> None:
    env = {"SIMULATED_DEVICES": "1", **({"SIMULATED_UUIDS": "one machine's"} if shared else {})}
    job = launcher.run_python(ranks, PROGRAM, env=env, forked=True)
    assert job.returncode == 0, job.output
    assert "calls_inside_backward" in job.stdout


@pytest.mark.waits
def test_a_bucket_that_never_ends(launcher: Launcher, tmp_path: Path) -> None:
    """Its call has returned: it is reported all the same, with the line of backward()."""
    env = {"SIMULATED_DEVICES": "1", "MPISTRAT_STALL_SECONDS": "2"}
    job = launcher.run_python(2, PROGRAM, "stall", env=env, cwd=tmp_path)
    assert job.returncode != 0, job.output
    assert "ranks 0, 1 wait in collective number" in job.output
    assert "gradients, bucket 1 of 4" in job.output
    line = PROGRAM.read_text().splitlines().index(BACKWARD) + 1
    assert f"      at {PROGRAM}:{line} in backward" in job.output, job.output
