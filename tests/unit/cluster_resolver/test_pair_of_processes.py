"""What may start two processes that are an MPI job of their own."""

from pathlib import Path

import pytest

from mpistrat.cluster_resolver.pair_of_processes import commands

MPICH, OPEN_MPI = "MPICH Version:      5.0.2", "Open MPI v5.0.11, package: Open MPI"
RANK = {"PMI_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_pml": "ucx", "SLURM_JOB_ID": "7"}


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An MPI's folder, with a launcher; beside it a folder of programs, srun among them, that is PATH."""
    for program in (tmp_path / "mpi" / "bin" / "mpiexec", tmp_path / "bin" / "srun"):
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "mpi"


@pytest.mark.parametrize(
    ("version", "here", "there"),
    [
        (MPICH, ["-ppn", "2", "-hosts", "localhost"], ["-ppn", "1", "-hosts", "a,b"]),
        (OPEN_MPI, ["--host", "localhost:2"], ["--host", "a:1,b:1"]),
    ],
)
def test_the_launcher_beside_the_library(
    prefix: Path, version: str, here: list[str], there: list[str]
) -> None:
    """It knows nothing of this job; on one node nothing of the allocation either, which has other nodes."""
    library = str(prefix / "lib" / "libmpi.so.12")
    mpiexec = [str(prefix / "bin" / "mpiexec"), "-n", "2"]
    command, environment = next(commands(version, library, environ=RANK))
    assert (command, environment) == ([*mpiexec, *here], {"OMPI_MCA_pml": "ucx"})
    command, environment = next(commands(version, library, ["a", "b"], RANK))
    assert command == [*mpiexec, *there]
    assert environment == {"OMPI_MCA_pml": "ucx", "SLURM_JOB_ID": "7", "SLURM_OVERLAP": "1"}


def test_srun_comes_second(prefix: Path) -> None:
    """On a Cray there is nothing else."""
    environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n9"}
    ((command, environment),) = commands(MPICH, "", environ=environ)
    assert command[0] == str(prefix.parent / "bin" / "srun")
    assert {"--nodes=1", "--nodelist=n9", "--ntasks=2", "--overlap"} <= set(command)
    assert environment == environ
    ((command, _),) = commands(MPICH, "", ["n1.site", "n2.site"], environ)
    assert {"--nodes=2", "--nodelist=n1,n2", "--ntasks-per-node=1"} <= set(command)


def test_no_launcher(prefix: Path, tmp_path: Path) -> None:
    assert [*commands(MPICH, str(tmp_path / "lib" / "libmpi.so"), environ={})] == []
