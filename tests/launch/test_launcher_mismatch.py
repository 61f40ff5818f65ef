"""A launcher of one MPI with the library of another: one clear error, not N jobs of one rank each."""

import re
import sys
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher, run_job

pytestmark = [pytest.mark.quick, pytest.mark.both_mpis("launching")]

PRINT_TOPOLOGY = """
from mpistrat.cluster_resolver import MPIClusterResolver
t = MPIClusterResolver().topology()
print(f"rank {t.rank} of {t.size}", flush=True)
"""
OTHER = {"MPICH": "Open MPI", "Open MPI": "MPICH"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PRINT_TOPOLOGY)
    return path


def start(name: str, library: str, program: Path, ranks: int = 2) -> Job:
    loaded = {"MPI4PY_LIBMPI": str(Launcher.named(library).library())}
    return Launcher.named(name).run_python(ranks, program, env=loaded)


@pytest.mark.parametrize("name", ["MPICH", "Open MPI"])
def test_a_matching_pair_works(name: str, program: Path) -> None:
    job = start(name, name, program)
    assert job.returncode == 0, job.output
    assert sorted(re.findall(r"rank \d of \d", job.stdout)) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("name", ["MPICH", "Open MPI"])
def test_a_mismatched_pair_is_an_error_that_says_the_fix(name: str, program: Path) -> None:
    job = start(name, OTHER[name], program)
    assert job.returncode != 0
    assert "rank 0 of 1" not in job.stdout
    assert "TopologyError: 2 ranks were started" in job.output
    assert f"the loaded libmpi is {OTHER[name]}" in job.output
    assert "MPI4PY_LIBMPI" in job.output


@pytest.mark.parametrize("name", ["MPICH", "Open MPI"])
def test_an_mpi_that_the_user_initialized_is_checked_too(name: str, tmp_path: Path) -> None:
    """MPICH's library does not come that far under Open MPI's launcher: it aborts by itself."""
    program = tmp_path / "program.py"
    program.write_text("from mpi4py import MPI\n" + PRINT_TOPOLOGY)
    job = start(name, OTHER[name], program)
    assert job.returncode != 0
    assert "rank 0 of 1" not in job.stdout
    if name == "MPICH":
        assert "TopologyError: 2 ranks were started (PMI_SIZE=2, PMI_RANK=" in job.output
        assert "each sees a world of 1" in job.output


def test_no_library_under_a_launcher(program: Path) -> None:
    job = Launcher.named("MPICH").run_python(
        2, program, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so.12"}
    )
    assert job.returncode != 0
    assert "TopologyError: MPI4PY_LIBMPI=/nowhere/libmpi.so.12 cannot be used" in job.output


CHILD = "from mpi4py import MPI; print(f'child {MPI.COMM_WORLD.size}', flush=True)"  # one write: ranks mix theirs


@pytest.mark.parametrize("name", ["MPICH", "Open MPI"])
def test_a_child_process_may_use_mpi_on_its_own(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        PRINT_TOPOLOGY
        + f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}], check=True)\n"
    )
    job = Launcher.named(name).run_python(2, program)
    assert job.returncode == 0, job.output
    assert job.stdout.count("child 1") == 2


@pytest.mark.parametrize("name", ["MPICH", "Open MPI"])
def test_a_strategy_under_torchrun_is_an_error_on_each_process(name: str, tmp_path: Path) -> None:
    """To import the package is none, and neither is a strategy of one device."""
    program = tmp_path / "program.py"
    program.write_text(
        "import mpistrat as ms\n"
        "assert ms.OneDeviceStrategy('cpu').num_replicas_in_sync == 1\n"
        "try:\n"
        "    ms.MultiWorkerMirroredStrategy()\n"
        "except ms.errors.TopologyError as error:\n"
        "    print(f'{error}\\n', end='', flush=True)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(program)]
    job = run_job(torchrun, Launcher.named(name).environment(), seconds=60.0)
    assert job.returncode == 0, job.output
    assert job.stdout.count("torchrun has started 2 processes (WORLD_SIZE=2), but MPI sees") == 2


def test_a_child_process_of_a_rank_of_mpistrat_run_may_make_a_strategy(tmp_path: Path) -> None:
    """It inherits the variables of torchrun, which say the ranks of its parent's job."""
    program = tmp_path / "program.py"
    child = "import mpistrat; print(mpistrat.MultiWorkerMirroredStrategy().num_replicas_in_sync)"
    program.write_text(
        "import os, subprocess, sys\nassert os.environ['WORLD_SIZE'] == '2'\n"
        "assert 'TORCHELASTIC_RUN_ID' in os.environ\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    job = Launcher.named("MPICH").run_python(2, "-m", "mpistrat", "run", program)
    assert job.returncode == 0, job.output
    assert job.stdout.split() == ["1", "1"]
