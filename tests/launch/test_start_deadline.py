"""A start-up that one rank never joins ends with a message, under either MPI."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import MPI_NAMES, Launcher

pytestmark = [pytest.mark.both_mpis("launching"), pytest.mark.waits]

RANK = "import os, sys, time\nrank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])\n"
RESOLVE = (
    "from mpistrat.cluster_resolver import MPIClusterResolver\nMPIClusterResolver().topology()\n"
)


def run(name: str, folder: Path, program: str) -> str:
    path = folder / "program.py"
    path.write_text(program)
    job = Launcher.named(name).run_python(2, path, env={"MPISTRAT_START_SECONDS": "2"}, seconds=40)
    assert job.returncode != 0, job.output
    assert job.seconds < 30
    assert not job.left_behind
    return job.output


@pytest.mark.parametrize("name", MPI_NAMES)
def test_a_rank_that_never_initializes_mpi(name: str, tmp_path: Path) -> None:
    output = run(name, tmp_path, RANK + "if rank == 1: time.sleep(100)\n" + RESOLVE)
    assert (
        "rank 0 waited 2 s in MPI_Init for the other ranks: some of the 2 started processes never"
        in output
    )


@pytest.mark.parametrize("name", MPI_NAMES)
def test_a_rank_that_ends_before_it_initializes_mpi(name: str, tmp_path: Path) -> None:
    """Open MPI's launcher sees that by itself."""
    output = run(name, tmp_path, RANK + "if rank == 1: sys.exit(0)\n" + RESOLVE)
    assert "waited 2 s in MPI_Init" in output or "did not call" in output


@pytest.mark.parametrize("name", MPI_NAMES)
def test_a_rank_that_never_builds_a_strategy(name: str, tmp_path: Path) -> None:
    program = RANK + "from mpi4py import MPI\nif rank == 1: time.sleep(100)\n" + RESOLVE
    output = run(name, tmp_path, program)
    assert "rank 0 waited 2 s in the first collective call on this communicator" in output
