"""One rank with simulated accelerators: what is on them, and what a rank with several may have."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "placement.py"


@pytest.mark.time_limit(120)
@pytest.mark.usefixtures("simulated_accelerator")
def test_one_rank() -> None:
    """In a process of its own, for torch has one simulated kind of device for good."""
    command = [sys.executable, "-m", "support.simulated_accelerator", str(PROGRAM)]
    job = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=PROGRAM.parents[1]
    )
    assert job.returncode == 0, job.stderr
    checks = PROGRAM.read_text().count("def check_")
    assert job.stdout.count("0: check_") == checks > 10
    assert job.stderr.count("this job uses 1 of the 2 sim devices of its node") == 1
    assert "mpirun -n 2 python placement.py, or srun --ntasks-per-node=2" in job.stderr
