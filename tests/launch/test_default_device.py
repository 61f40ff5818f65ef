"""`torch.set_default_device` with the name of an accelerator: see `programs/default_device.py`."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

pytestmark = pytest.mark.usefixtures("simulated_accelerator")

PROGRAM = Path(__file__).parent / "programs/default_device.py"


@pytest.mark.parametrize(
    ("mpi", "ranks", "shared"),
    [("MPICH", 2, False), pytest.param("Open MPI", 3, True, marks=pytest.mark.slow)],
)
def test_the_numbers_are_the_cpu_s(tmp_path: Path, mpi: str, ranks: int, shared: bool) -> None:
    env = {"SIMULATED_DEVICES": "1", **({"SIMULATED_UUIDS": "one machine's"} if shared else {})}
    job = Launcher.named(mpi).run_python(ranks, PROGRAM, tmp_path, env=env, forked=True)
    assert job.returncode == 0, job.output
    assert "same 20" in job.stdout
