"""Native groups over other ranks of one node, which start at the same time: see `programs/groups_at_once.py`."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs" / "groups_at_once.py"


@pytest.mark.usefixtures("simulated_accelerator")
@pytest.mark.parametrize(
    "launcher", ["MPICH", pytest.param("Open MPI", marks=pytest.mark.slow)], indirect=True
)
def test_groups_at_once(launcher: Launcher, tmp_path: Path) -> None:
    """Two strategies over two ranks each; and, where MPICH makes up two nodes, one that goes by node."""
    limits = {"MPISTRAT_START_SECONDS": "16", "MPISTRAT_STALL_SECONDS": "8"}
    env = {"SIMULATED_DEVICES": "1", "MPIR_CVAR_NUM_CLIQUES": "2", **limits}
    job = launcher.run_python(4, PROGRAM, env=env, cwd=tmp_path, forked=True)
    assert job.returncode == 0, job.output
    last = "by node" if launcher.name == "MPICH" else "all alike"
    expected = [f"done {name}" for name in ("halves", "every second", last)]
    assert [line for line in job.stdout.splitlines() if "done" in line] == expected, job.output
