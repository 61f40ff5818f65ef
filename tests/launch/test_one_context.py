"""A rank opens a context on its own device only: see `programs/one_context.py`."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs" / "one_context.py"


@pytest.mark.usefixtures("simulated_accelerator")
@pytest.mark.parametrize(
    "launcher", ["MPICH", pytest.param("Open MPI", marks=pytest.mark.slow)], indirect=True
)
def test_a_rank_has_one_context(launcher: Launcher, tmp_path: Path) -> None:
    """Each process sees both devices of the node, and a new thread begins with the first one."""
    env = {"SIMULATED_DEVICES": "2", "SIMULATED_UUIDS": "of the node"}
    job = launcher.run_python(2, PROGRAM, tmp_path, env=env, cwd=tmp_path, forked=True)
    assert job.returncode == 0, job.output
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("contexts"))
    assert lines == ["contexts of rank 0 [0]", "contexts of rank 1 [1]"], job.output
    assert "Traceback" not in job.output, job.output
