"""Ranks with simulated accelerators: modules and what belongs to them are on each rank's own."""

import os
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support" / "placement.py"


@pytest.mark.usefixtures("simulated_accelerator")
def test_two_ranks() -> None:
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    program = ["-m", "support.simulated_accelerator", str(PROGRAM)]
    job = Launcher.named("MPICH").run_python(2, *program, env={"PYTHONPATH": path})
    assert job.returncode == 0, job.output
    checks = PROGRAM.read_text().count("def check_")
    assert [job.stdout.count(f"{rank}: check_") for rank in range(2)] == [checks, checks]
    assert job.stderr.count("this job uses 2 of the 4 sim devices of its node") == 1
    assert job.left_behind == ()
