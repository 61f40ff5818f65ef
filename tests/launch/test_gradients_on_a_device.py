"""Gradients on simulated accelerators: see `programs/gradients_on_a_device.py`."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs/gradients_on_a_device.py"

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
