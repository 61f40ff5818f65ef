"""At the end of a program the ranks compare what they have not compared before: `programs/drift_at_the_end.py`."""

from pathlib import Path

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs/drift_at_the_end.py"
DRIFT = "drifted apart: Linear.weight is "
CAUSE = "between optimizer steps 0 and 1; the likely cause: no backward() reduced the gradients"


def test_drift_is_told(launcher: Launcher) -> None:
    job = launcher.run_python(2, PROGRAM, forked=True)
    assert job.returncode == 0, job.output
    assert job.output.count(DRIFT) == 1, job.output
    assert CAUSE in job.output


def test_drift_can_be_an_error(launcher: Launcher) -> None:
    raising = {"MPISTRAT_ON_DRIFT": "raise"}
    job = launcher.run_python(2, PROGRAM, "alive", env=raising, forked=True)
    assert job.returncode == 1, job.output
    assert job.output.count(DRIFT) == 1, job.output


def test_a_right_program_ends_in_silence(launcher: Launcher) -> None:
    job = launcher.run_python(2, PROGRAM, "right", forked=True)
    assert job.returncode == 0, job.output
    assert "drift" not in job.output
