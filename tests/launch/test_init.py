"""`mpistrat init`: the files that it writes run as they are."""

import functools
import sys
from pathlib import Path

import pytest
import torch

from support.clusters.slurm_cluster import SlurmCluster
from support.harness.mpi_launcher import Launcher, run_job

NAMES = ["test_train.py", "train.py", "train.sbatch"]
INIT = [sys.executable, "-m", "mpistrat", "init"]


def test_the_training_and_its_test(launcher: Launcher, tmp_path: Path) -> None:
    """test_train.py runs train.py on one rank and on two."""
    made = run_job([*INIT, "new"], launcher.environment(), 60, tmp_path)
    assert made.returncode == 0, made.output
    folder = tmp_path / "new"
    assert made.stdout.startswith(
        f"Wrote train.py, train.sbatch, test_train.py in {folder}. Next, "
    )
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_train.py"]
    tested = run_job(command, launcher.environment(), 120, folder)
    assert tested.returncode == 0, tested.output
    assert "1 passed" in tested.stdout
    bare = launcher.environment() | {"PATH": "/bin-of-nothing"}
    refused = run_job(command, bare, 60, folder)
    assert "there is no mpiexec and no srun here: load the module of your MPI" in refused.stdout
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == NAMES


def test_the_model_stays_after_a_training(tmp_path: Path) -> None:
    launcher = Launcher.named("MPICH")
    made = run_job(INIT, launcher.environment(), 60, tmp_path)
    assert made.returncode == 0, made.output
    command = [sys.executable, "-m", "mpistrat", "verify", "train.py"]
    verified = run_job(command, launcher.environment(), 120, tmp_path)
    assert verified.returncode == 0, verified.output
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    program = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(program.replace("(4096, 20)", "(5000, 20)"))
    run = functools.partial(launcher.run_python, 2, "train.py", forked=True, cwd=tmp_path)
    first, again = run(seconds=60), run(seconds=60)
    assert first.returncode == again.returncode == 0, first.output + again.output
    assert first.stdout.splitlines()[-1].startswith("step 320: loss 0.")
    assert "has all steps. Remove the folder checkpoints to train again." in again.stdout
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {*state} == {"weight", "bias"}


def test_ranks_draw_no_trace(launcher: Launcher, tmp_path: Path) -> None:
    """They would write the same files at the same time."""
    job = launcher.run_python(2, "-m", "mpistrat", "trace", ".", cwd=tmp_path)
    assert job.returncode != 0
    assert job.stderr.count("mpistrat trace: error: start it once, without mpirun or srun\n") == 1
    assert "no part of a trace" not in job.stderr


def test_ranks_write_nothing(launcher: Launcher, tmp_path: Path) -> None:
    job = launcher.run_python(2, "-m", "mpistrat", "init", cwd=tmp_path)
    assert job.returncode != 0
    assert job.stderr.count("mpistrat init: error: start it once, without mpirun or srun\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slurm
def test_slurm_runs_the_batch_script(slurm: SlurmCluster, tmp_path: Path) -> None:
    """It has this cluster's facts: nothing has to be edited."""
    mpich = Launcher.named("MPICH")
    made = run_job(INIT, slurm.environment(mpich), 60, tmp_path)
    assert made.returncode == 0, made.output
    lines = (tmp_path / "train.sbatch").read_text().splitlines()
    partition = slurm.run("sinfo", "--noheader", "--format=%P").split("*")[0]
    assert f"#SBATCH --partition={partition}" in lines
    assert f"source {sys.prefix}/bin/activate" in lines
    options = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1")
    job = slurm.sbatch(mpich, tmp_path / "train.sbatch", *options, cwd=tmp_path)
    assert job.wait() == "COMPLETED", job.report()
    assert "\nstep 320: loss 0." in job.output, job.report()
