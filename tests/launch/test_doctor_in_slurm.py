"""`mpistrat doctor` under a real Slurm."""

import json
import sys

import pytest

from support.clusters.slurm_cluster import SlurmCluster
from support.harness.mpi_launcher import Launcher

pytestmark = pytest.mark.slurm

DOCTOR = (sys.executable, "-m", "mpistrat", "doctor")
TWO_NODES = ("-N2", "-wn1,n2", "--ntasks-per-node=2")


def test_a_step(slurm: SlurmCluster) -> None:
    job = slurm.srun(Launcher.named("MPICH"), *TWO_NODES, "--mpi=pmi2", *DOCTOR, "--json")
    assert job.returncode == 0, job.output
    content = json.loads(job.stdout)
    texts = [f["text"] for f in content["findings"] if f["level"] == "ok"]
    assert any(text.startswith("4 ranks on 2 nodes as started by") for text in texts), job.output
    line = next(text for text in texts if text.startswith("Slurm: job"))
    assert "nodes n[1-2], tasks per node 2(x2)" in line
    assert "pmi2" in line
    assert [rank["host"] for rank in content["facts"]["ranks"]] == ["n1", "n1", "n2", "n2"]
    assert len(content["facts"]["links"]["rates"]) == 1


def test_a_step_without_pmi(slurm: SlurmCluster) -> None:
    """Four worlds of one: one of them speaks, with what this srun offers."""
    job = slurm.srun(Launcher.named("MPICH"), *TWO_NODES, "--mpi=none", *DOCTOR)
    assert job.returncode != 0
    said = " ".join(job.stdout.split())
    assert said.count("4 ranks were started (SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=0)") == 1
    assert said.count("PROBLEM") == 1, job.output
    assert "fix: srun --mpi=pmi2" in said


def test_open_mpi_under_a_pmi_that_it_does_not_speak(slurm: SlurmCluster) -> None:
    job = slurm.srun(Launcher.named("Open MPI"), *TWO_NODES, "--mpi=pmi2", *DOCTOR)
    assert job.returncode != 0
    said = " ".join(job.stdout.split())
    assert said.count("each would see a world of 1") == 1, job.output
    assert "fix: srun --mpi=pmix" in said
    assert "inside sbatch or salloc" in said


@pytest.mark.long(
    "A rank waits for MPISTRAT_START_SECONDS, within which ranks have to start on a busy machine."
)
def test_a_node_without_an_mpi_library(slurm: SlurmCluster) -> None:
    """Rank 0 has one, and waits for the others in vain: the node itself tells what it lacks."""
    lacking = '[ "$SLURM_NODEID" = 0 ] || export MPI4PY_LIBMPI=/nowhere/libmpi.so.12; exec "$@"'
    command = ("sh", "-c", lacking, "sh", *DOCTOR)
    late = {"MPISTRAT_START_SECONDS": "20"}
    job = slurm.srun(Launcher.named("MPICH"), *TWO_NODES, "--mpi=pmi2", *command, env=late)
    assert job.returncode != 0
    assert "PROBLEM MPI: MPI_Init of rank 0 on n1" in " ".join(job.stdout.split()), job.output
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpistrat doctor: ")]
    assert len(lines) == 1, job.output
    assert lines[0].startswith("mpistrat doctor: rank 2 on n2, loading the MPI library: ")
