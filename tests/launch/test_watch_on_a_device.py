"""The watch on simulated accelerators: see `programs/watch_on_a_device.py`."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs/watch_on_a_device.py"

pytestmark = pytest.mark.usefixtures("simulated_accelerator")


def test_drift_on_devices(launcher: Launcher) -> None:
    job = launcher.run_python(2, PROGRAM, env={"SIMULATED_DEVICES": "1"}, forked=True)
    assert job.returncode == 0, job.output
    assert job.output.count("drifted apart: Sequential.0.weight is ") == 1, job.output
    assert "between optimizer steps 8 and 16" in job.output
    assert "have written values or their .data outside optimizer.step()" in job.output
