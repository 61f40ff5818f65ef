"""Whether MPI takes device memory: two processes try, and none of their ends is an end of ours."""

import re
import sys
from pathlib import Path

import pytest

from support.clusters.slurm_cluster import SlurmCluster
from support.harness.mpi_launcher import Launcher
from support.memory_for_mpi import cupy_with

TESTS = Path(__file__).parents[1]

SIMULATED = f"""
import sys
sys.path.append({str(TESTS)!r})
from support.simulated_accelerator import torch_sim
torch_sim.load()
"""
NONE_VISIBLE = """
class accelerator:
    current_accelerator, device_count = lambda: type("cuda", (), {"type": "cuda"}), lambda: 0
"""
REFUSED = "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable"
PROGRAM = """
import os, sys
from mpistrat.liveness import deadlines
from mpistrat.cluster_resolver.mpi import start_mpi
start_mpi()
from mpistrat.communicators.transports.accelerator import device_memory_proof as proof

for name in ("taken", "read", "simulated", "none", "exclusive", "hangs"):
    library = "torch" if name in ("simulated", "none") else "cupy"
    os.environ["PYTHONPATH"] = f"{sys.argv[1]}/{name}"
    if name == "hangs":
        deadlines.RANK_WAITS_FOR_TRIAL_OF_DEVICE = 2
    proof.reason_against.cache_clear()
    print(name, repr(proof.reason_against(library, 0)), flush=True)

proof.run = None
print("kept", repr(proof.reason_against("cupy", 0)))
os.environ["PATH"], proof.library_path = "", lambda: ""
print("alone", repr(proof.reason_against("cupy", 1)))
"""


@pytest.mark.usefixtures("simulated_accelerator")
def test_what_mpi_takes(launcher: Launcher, tmp_path: Path) -> None:
    """A simulated device has memory that the host cannot read: MPI ends by a signal, as with that of a real one."""
    modules = {
        "taken/cupy.py": cupy_with(),
        "read/cupy.py": cupy_with("copies.append(self.copy()) or copies[-1].ctypes.data"),
        "simulated/sitecustomize.py": SIMULATED,
        "none/torch.py": NONE_VISIBLE,
        "exclusive/cupy.py": cupy_with(seconds=f"raise RuntimeError({REFUSED!r})"),
        "hangs/cupy.py": cupy_with(seconds="__import__('time').sleep(60)"),
        "program.py": PROGRAM,
    }
    for name, text in modules.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    job = launcher.run_python(1, tmp_path / "program.py", tmp_path, seconds=30)
    assert job.returncode == 0, job.output
    found = dict(re.findall(r"(?m)^(\w+) ['\"](.*)['\"]$", job.stdout))
    assert found["taken"] == ""
    sent = "two processes on its node that sent device memory: "
    assert found["read"].startswith(sent), found
    assert "elements are wrong" in found["read"]
    assert found["simulated"].startswith(sent), found
    assert re.search(r"exit code (11|139)\b", found["simulated"]), found
    unused = (
        sent.replace("sent", "were to send")
        + "exit code 1, RuntimeError: no accelerator can be used: "
    )
    assert found["none"] == f"{unused}none is visible", found
    assert found["exclusive"].startswith(f"{unused}{REFUSED}. Exclusive mode lets one process"), (
        found
    )
    assert found["hangs"].startswith(sent), found
    assert found["kept"] == found["hangs"]
    assert found["alone"].startswith("no two processes on its node could be started"), found
    assert job.left_behind == ()


IN_SLURM = """
import os, sys
from mpistrat.cluster_resolver.mpi import start_mpi
mpi = start_mpi()
from mpistrat.communicators.transports.accelerator import device_memory_proof as proof

nodes = mpi.COMM_WORLD.allgather(os.environ["SLURMD_NODENAME"])
if mpi.COMM_WORLD.rank == 0:
    os.environ["PYTHONPATH"] = sys.argv[1]
    if sys.argv[2] == "srun":  # as on a Cray
        os.environ["PATH"], proof.library_path = "/usr/bin:/bin", lambda: ""
    for hosts in ((), tuple(sorted(set(nodes)))):
        print("found", repr(proof.reason_against("cupy", 0, hosts)), flush=True)
mpi.COMM_WORLD.Barrier()
"""


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("starts", ["mpiexec", "srun"])
def test_in_a_step_of_slurm(slurm: SlurmCluster, tmp_path: Path, starts: str) -> None:
    """Two processes on a node, and on two, are started from within a step that has all cores of both."""
    (tmp_path / "cupy.py").write_text(cupy_with())
    (tmp_path / "program.py").write_text(IN_SLURM)
    program = sys.executable, tmp_path / "program.py", tmp_path, starts
    job = slurm.srun(Launcher.named("MPICH"), "-N2", "-n4", "--mpi=pmi2", *program)
    assert job.returncode == 0, job.output
    assert re.findall(r"found (.*)", job.stdout) == ["''", "''"], job.output
