"""A rank that fails or ends before it has built a strategy ends the job, by name: nobody waits for a time limit."""

import re
import sys
import time
from pathlib import Path

import pytest

from launch.fault_jobs import HOST_AND_PID, SECONDS_TO_END
from mpistrat.liveness import deadlines
from support.clusters.slurm_cluster import SlurmCluster
from support.fault_table import fault_table
from support.harness.mpi_launcher import Job, Launcher

pytestmark = [pytest.mark.both_mpis("launching"), pytest.mark.waits]

SECONDS = 15.0  # the start of three ranks on two cores, too
WHO = rf"mpistrat: rank 1 of 3{HOST_AND_PID}"
WHO_ENDS = rf"mpistrat: ending the job: rank 1 of 3{HOST_AND_PID}"
ABSENT = r"but ranks? [02](, 2)? waits? for all ranks to start MPI, or to build the strategy"

RANK = """
import os, sys, time
names = "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"
rank = next(int(os.environ[name]) for name in names if name in os.environ)
import mpistrat as ms
"""
# The others' imports take longer than the observer waits for a late rank, once the first has ended.
SLEEP = f"if rank != 1: time.sleep({deadlines.OBSERVER_WAITS_FOR_LATE_RANK + 1.0})"
LATE = RANK.replace("import mpistrat", f"{SLEEP}\nimport mpistrat")
BUILD = "ms.MultiWorkerMirroredStrategy()\nprint('should not be reached')\n"


def run(launcher: Launcher, folder: Path, program: str, start: str = RANK) -> Job:
    path = folder / "program.py"
    path.write_text(start + program)
    job = launcher.run_python(3, path, cwd=folder)
    assert job.left_behind == (), job.output
    assert "should not be reached" not in job.output
    return job


def ended(launcher: Launcher, folder: Path, program: str, start: str = RANK) -> Job:
    job = run(launcher, folder, program + BUILD, start)
    assert job.returncode != 0, job.output
    assert job.seconds < SECONDS, job.output
    return job


@pytest.mark.quick
def test_an_exception(launcher: Launcher, tmp_path: Path) -> None:
    """Before MPI_Init, in which the others wait."""
    job = ended(launcher, tmp_path, "if rank == 1: raise ValueError('wrong')\n")
    assert job.returncode == 1
    assert re.search(WHO + r" failed; ending the job\nTraceback", job.stderr), job.stderr
    assert job.stderr.count("\nValueError: wrong\n") == 1


def test_an_exit_code(launcher: Launcher, tmp_path: Path) -> None:
    """When MPI runs, and MPI_Finalize would wait for the others."""
    program = "from mpi4py import MPI\nif rank == 1: sys.exit(3)\n"
    job = ended(launcher, tmp_path, program)
    assert job.returncode == 3
    assert re.search(WHO_ENDS + r" called sys.exit\(3\) at \S+program.py:\d+", job.stderr), (
        job.stderr
    )


@pytest.mark.parametrize("mpi", ["", "from mpi4py import MPI\n"], ids=["before MPI", "with MPI"])
def test_an_end_without_an_error(launcher: Launcher, tmp_path: Path, mpi: str) -> None:
    job = ended(launcher, tmp_path, f"{mpi}if rank == 1: sys.exit(0)\n")
    assert re.search(WHO + r" called sys.exit\(0\) at \S+program.py.*, " + ABSENT, job.stderr), (
        job.stderr
    )
    assert job.stderr.count("mpistrat: rank") == 1


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_an_end_before_the_others_have_started(
    launcher: Launcher, tmp_path: Path, end: str
) -> None:
    now = "if rank == 0: open('waits', 'w').write(str(time.time()))"
    began = time.time()
    job = ended(launcher, tmp_path, f"if rank == 1: {end}\n{now}\n", start=LATE)
    waited = began + job.seconds - float((tmp_path / "waits").read_text())
    (row,) = (row for row in fault_table() if row.name == "ends_early")
    assert re.search(row.printed, job.stderr), job.stderr
    assert waited < row.seconds(0.0) + SECONDS_TO_END
    assert re.search(WHO + r".* (called sys.exit|ended).*, " + ABSENT, job.stderr), job.stderr


def test_ranks_that_never_import_it(launcher: Launcher, tmp_path: Path) -> None:
    """The observer of the rank that has ended waits for them, longer than for a late rank, and ends with them."""
    alone = RANK.replace("import mpistrat", "if rank == 0: import mpistrat").replace(" as ms", "")
    job = run(launcher, tmp_path, "time.sleep((rank > 0) * 3.5)\n", alone)
    assert (job.returncode, job.output) == (0, "")


@pytest.mark.slow
def test_an_exit_code_while_the_others_compute(launcher: Launcher, tmp_path: Path) -> None:
    """Before MPI_Init, which no rank calls."""
    job = ended(launcher, tmp_path, "if rank == 1: sys.exit(3)\ntime.sleep(100)\n")
    assert job.returncode == 3
    assert re.search(WHO_ENDS + r" called sys.exit\(3\)", job.stderr), job.stderr


def test_programs_without_a_strategy(launcher: Launcher, tmp_path: Path) -> None:
    """They end as they like, if none fails: one after the other, and by the same exit code."""
    program = """
import subprocess
failing = "import sys, mpistrat; sys.exit(5)"  # no rank, though it has a rank's variables
assert subprocess.run([sys.executable, "-c", failing]).returncode == 5
time.sleep(0.4 * rank)
print("done", flush=True)
if rank == 0: sys.exit()
"""
    job = run(launcher, tmp_path, program)
    assert (job.returncode, job.stdout.count("done"), job.stderr) == (0, 3, "")


@pytest.mark.slurm
@pytest.mark.parametrize(
    "before", ["pass", pytest.param("del os.environ['PMI_FD']", marks=pytest.mark.slow)]
)
def test_an_exit_code_under_srun(slurm: SlurmCluster, tmp_path: Path, before: str) -> None:
    """Slurm waits for the other tasks; it is asked by PMI not to, and else by scancel."""
    program = tmp_path / "program.py"
    program.write_text(f"{RANK}if rank == 1:\n    {before}\n    sys.exit(3)\n{BUILD}")
    arguments = ["--kill-on-bad-exit=0", "-N2", "-n3", "--mpi=pmi2", sys.executable, program]
    job = slurm.srun(Launcher.named("MPICH"), *arguments)
    assert job.returncode != 0, job.output
    assert job.seconds < SECONDS
    assert re.search(WHO_ENDS + r" called sys.exit\(3\) at \S+program.py", job.stderr), job.stderr


def test_an_end_under_srun_before_the_others_have_started(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    no_limit = "os.environ['MPISTRAT_START_SECONDS'] = '0'"
    program.write_text(f"{LATE}{no_limit}\nif rank == 1: sys.exit(0)\n{BUILD}")
    arguments = ["-N2", "-n3", "--mpi=pmi2", sys.executable, program]
    job = slurm.srun(Launcher.named("MPICH"), *arguments)
    assert job.returncode != 0, job.output
    assert job.seconds < SECONDS
    assert re.search(WHO + r".*called sys.exit.*, " + ABSENT, job.stderr), job.stderr


@pytest.mark.slow
def test_all_ranks_exit_with_the_same_code(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "time.sleep(0.2 * rank)\nsys.exit(2)\n")
    assert job.returncode == 2
    assert "mpistrat: " not in job.stderr
