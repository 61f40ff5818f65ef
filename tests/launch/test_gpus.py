"""GPUs in whole jobs, on a machine without one: NCCL that hangs, and scripts/test-gpu."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher, run_job

pytestmark = pytest.mark.waits

TOP = Path(__file__).parents[2]
PROGRAM = """
import numpy as np, pytest
from support import stand_in_cupy
from mpi4py import MPI
import mpistrat as ms

patch = pytest.MonkeyPatch()
stand_in_cupy.install(patch, [f"0000:0{MPI.COMM_WORLD.rank}:00.0"])
strategy = ms.MultiWorkerMirroredStrategy()
stand_in_cupy.kernels_never_end(patch)
try:
    strategy.extended.communicator.all_reduce(stand_in_cupy.asarray(np.ones(3, "float32")))
except ms.errors.StallError:
    print("raised, and then", stand_in_cupy.CALLS[-1])
"""
LIMIT = 2.0


@pytest.mark.parametrize("then", ["end", "raise"])
def test_nccl_that_hangs_is_a_stall(launcher: Launcher, tmp_path: Path, then: str) -> None:
    """All ranks have come, and the kernels do not end: reported, and ended or raised; NCCL is aborted first."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = launcher.run_python(
        2,
        program,
        env={
            "PYTHONPATH": os.pathsep.join(map(str, (TOP, TOP / "tests"))),
            "MPISTRAT_STALL_SECONDS": f"{LIMIT:g}",
            "MPISTRAT_ON_STALL": then,
        },
        cwd=tmp_path,
    )
    assert job.returncode != 0, job.output
    assert "all ranks have come to it, but it does not end" in job.output
    assert "all_reduce(sum, float32 on a GPU (CuPy), (3,))" in job.output
    assert job.stdout.count("raised, and then abort") == (2 if then == "raise" else 0), job.output
    assert job.left_behind == ()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="needs a machine without a GPU")
def test_the_script_says_that_there_is_no_gpu(launcher: Launcher, tmp_path: Path) -> None:
    environment = launcher.environment({"PYTHON": sys.executable})
    job = run_job(["scripts/test-gpu", str(tmp_path)], environment, 150, TOP)
    assert job.returncode == 0, job.output
    assert (
        "no GPU that torch can use: the tests were skipped, and nothing was measured" in job.stdout
    )
    assert "needs a GPU that torch can use" in (tmp_path / "report.md").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [stage["passed"] + stage["failed"] for stage in report["tests"]] == [0, 0, 0]
    assert all(stage["skipped"] > 0 for stage in report["tests"])
    assert report["programs"] == report["benchmarks"] == []
