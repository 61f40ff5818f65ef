"""GPUs in whole jobs, on a machine without one: NCCL that hangs, and scripts/test-gpu."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.accelerator import DEVICE_VARIABLE
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


def test_a_run_that_is_cut_off_has_told_what_it_knew(tmp_path: Path) -> None:
    """Results come one by one, and the report has them. Ranks that share the stand-in's GPU use its NCCL."""
    environment = Launcher.named("MPICH").environment(
        {"PYTHON": sys.executable, DEVICE_VARIABLE: "sim", "PYTHONPATH": str(TOP)}
    )
    words = ["--quick", "--only", "arrays of CuPy", "--only", "a stalled device", str(tmp_path)]
    script = subprocess.Popen(
        [TOP / "scripts/test-gpu", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert script.stdout is not None
    lines = []
    for line in script.stdout:
        lines.append(line.strip())
        if lines[-1].startswith("a stalled device"):
            os.killpg(script.pid, signal.SIGTERM)
    assert script.wait(30) != 0
    assert lines[0].startswith("needed: torch, "), lines
    assert "done arrays of CuPy" in lines
    assert any(line.startswith("ok      arrays of CuPy 2") for line in lines), lines
    text = (tmp_path / "report.md").read_text()
    assert "| arrays of CuPy | 2 | ok |" in text
    assert "Not run: a stalled device 2." in text


@pytest.mark.slow
@pytest.mark.time_limit(600)
@pytest.mark.long("All programs that a GPU runs, one after the other.")
@pytest.mark.usefixtures("simulated_accelerator")
def test_all_programs_that_nccl_runs(tmp_path: Path) -> None:
    """On the simulated accelerator: two ranks share one, and each is a host to its group."""
    environment = Launcher.named("MPICH").environment(
        {"PYTHON": sys.executable, DEVICE_VARIABLE: "sim", "PYTHONPATH": str(TOP)}
    )
    job = run_job(["scripts/test-gpu", "--quick", str(tmp_path)], environment, 500, TOP)
    assert job.returncode == 0, job.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [program["result"] for program in report["native"]] == ["ok"] * 8
    assert report["not_run"] == []
