"""Ranks on several nodes have no memory in common: CentralStorageStrategy says so on all of them."""

from pathlib import Path

from support.harness.mpi_launcher import Launcher

PROGRAM = """
import mpistrat as ms
from mpi4py import MPI

try:
    ms.CentralStorageStrategy()
except ValueError as error:
    told = str(error)
print(MPI.COMM_WORLD.rank, told + "\\n", end="", flush=True)
"""


def test_several_nodes_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = Launcher.named("MPICH").run_python(3, program, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert job.returncode == 0, job.output
    message = "the ranks are on 2 nodes: use MultiWorkerMirroredStrategy"
    assert sorted(line[0] for line in job.stdout.splitlines() if message in line) == ["0", "1", "2"]
    assert job.left_behind == ()
