"""What does nothing here says so, once in a job, and why; tests/unit/test_arguments.py finds what is not used."""

from pathlib import Path

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs/no_effect.py"


def test_what_does_nothing_says_so_once() -> None:
    job = Launcher.named("MPICH").run_python(2, PROGRAM, forked=True)
    assert job.returncode == 0, job.output
    assert job.stdout.count("has heard what it should") == 2
