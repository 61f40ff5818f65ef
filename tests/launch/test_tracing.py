"""MPISTRAT_TRACE from the outside: what a job leaves in the folder, however it ends."""

import ast
import os
import re
import socket
from pathlib import Path

import pytest

from mpistrat.__main__ import main
from mpistrat.trace.merging import merge
from support.harness.mpi_launcher import Job, Launcher
from support.trace_rules import slices_of, valid_trace

PROGRAM = Path(__file__).parent / "programs" / "traced.py"
TOP = Path(__file__).parents[2]
STEPS = 4
SECONDS_LATE = 0.2


def run(launcher: Launcher, folder: Path, scenario: str, ranks: int = 3, trace: str = "t") -> Job:
    env = {"MPISTRAT_TRACE": trace, "PYTHONPATH": str(TOP)}
    job = launcher.run_python(
        ranks, PROGRAM, scenario, env=env, cwd=folder, seconds=90, forked=True
    )
    assert job.left_behind == (), job.output
    return job


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_training_of_three_ranks(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "train")
    assert job.returncode == 0, job.output
    assert "events of 3 ranks are in" in job.stderr, job.output
    assert files(tmp_path / "t") == ["trace.json"]
    events = valid_trace(tmp_path / "t" / "trace.json")
    for rank in range(3):
        mine = [event for event in events if event["pid"] == rank]
        runs = slices_of(mine, "strategy.run")
        assert [event["args"]["function"] for event in runs] == ["train.<locals>.step"] * STEPS
        for name in ("strategy.reduce", "backward", "reduce gradients", "SGD.step"):
            assert len(slices_of(mine, name)) == STEPS, name
        assert len(slices_of(mine, "next(iterator)")) == STEPS + 1
        assert slices_of(mine, "mirror")
        # What happens within a step lies within it.
        for outer, inner in zip(runs, slices_of(mine, "reduce gradients"), strict=True):
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    waits = [event for event in slices_of(events, "wait for the others") if event["pid"] == 0]
    longest = max(
        (event for event in waits if in_training(event, events)), key=lambda event: event["dur"]
    )
    assert longest["dur"] > 0.8 * SECONDS_LATE * 1e6
    (cause,) = [
        event
        for event in events
        if event.get("cat") == "collective" and (event["pid"], event["ts"]) == (0, longest["ts"])
    ]
    assert cause["args"]["last to enter"] == "rank 1"
    assert cause["args"]["at"].startswith(f"{PROGRAM}:")
    ranges = dict(ast.literal_eval(job.stdout.strip()))
    for name in ("strategy.run", "strategy.reduce", "backward", "reduce gradients"):
        assert ranges[f"mpistrat::{name}"] == STEPS
    collectives = [e for e in slices_of(events, "all_reduce") if e["pid"] == 0]
    assert ranges["mpistrat::all_reduce"] == len([e for e in collectives if in_training(e, events)])


def in_training(event: dict, events: list[dict]) -> bool:
    """After the first `next`."""
    return event["ts"] > min(e["ts"] for e in slices_of(events, "next(iterator)") if e["pid"] == 0)


DDP = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(16):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02 * dist.get_rank())
"""


def without_numbers(text: str) -> list[str]:
    return re.sub(r"[\d.]+", "0", text).split()


def test_a_program_of_torch_distributed(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mpistrat trace` names the rank that is slow."""
    (tmp_path / "ddp.py").write_text(DDP)
    words = ("-m", "mpistrat", "run", "ddp.py")
    threads = str(os.cpu_count())  # no core is left for a communication thread
    env = {"MPISTRAT_TRACE": "t", "PYTHONPATH": str(TOP), "OMP_NUM_THREADS": threads}
    job = launcher.run_python(2, *words, env=env, cwd=tmp_path)
    assert job.returncode == 0, job.output
    assert job.stderr.count("events of 2 ranks are in") == 1, job.output
    events = valid_trace(tmp_path / "t" / "trace.json")
    for name in ("step", "SGD.step"):
        assert [e["pid"] for e in slices_of(events, name)] == [0] * 16 + [1] * 16
    assert main(["trace", str(tmp_path / "t")]) == 0
    output = capsys.readouterr().out
    page = (TOP / "docs" / "tracing.md").read_text()
    (shown,) = re.findall(r"```text\n(traces/run1/timeline.*?)```", page, re.DOTALL)
    here = output.replace(str(tmp_path / "t"), "traces/run1").replace(socket.gethostname(), "vm")
    assert without_numbers(here) == without_numbers(shown)
    assert here.splitlines()[0] == shown.splitlines()[0]
    assert here.splitlines()[-1] == shown.splitlines()[-1]
    for text in (here, shown):  # rank 1 sleeps 15 times, for 20 ms, after the first step
        total, waits = (float(number) for number in re.findall(r"([\d.]+) s ", text)[:2])
        assert 0.25 < waits < total
    assert files(tmp_path / "t") == ["timeline.png", "trace.json"]


def test_one_rank_without_others(tmp_path: Path) -> None:
    job = run(Launcher.named("MPICH"), tmp_path, "train", ranks=1)
    assert job.returncode == 0, job.output
    events = valid_trace(tmp_path / "t" / "trace.json")
    assert len(slices_of(events, "strategy.run")) == STEPS
    assert len(slices_of(events, "SGD.step")) == STEPS


def test_a_killed_rank_leaves_its_part(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "killed")
    assert job.returncode != 0
    assert files(tmp_path / "t") == ["rank-0.part", "rank-1.part", "rank-2.part"]
    output = merge(str(tmp_path / "t")).describe()
    assert "the part has no end of ranks 0, 1, 2" in output
    events = valid_trace(tmp_path / "t" / "trace.json")
    for rank in range(3):
        mine = [event for event in events if event["pid"] == rank]
        assert len(slices_of(mine, "strategy.run")) >= 51


def test_a_failed_rank_leaves_all_it_did(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "fails")
    assert job.returncode != 0
    assert "an error of one rank" in job.stderr
    merge(str(tmp_path / "t"))
    events = valid_trace(tmp_path / "t" / "trace.json")
    assert len([e for e in slices_of(events, "all_reduce") if e["pid"] == 1]) >= 1


def test_a_folder_that_cannot_be_made(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for ranks in (1, 2):
        job = run(launcher, tmp_path, "some_ranks_alone", ranks, trace="file/t")
        assert job.returncode != 0
        assert f"MPISTRAT_TRACE='{tmp_path}/file/t': rank " in job.stderr, job.output
        assert "TopologyError" in job.stderr


def test_a_full_disk_ends_the_trace_only(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "disk_is_full")
    assert job.returncode == 0, job.output
    assert job.stdout.count("trained") == 3
    assert job.stderr.count("rank 1 cannot write to") == 1, job.output
    assert "the part has no end of rank 1" in job.stderr
    events = valid_trace(tmp_path / "t" / "trace.json")
    assert len([e for e in slices_of(events, "all_reduce") if e["pid"] == 2]) > 5000


def test_strategies_of_one_rank_are_on_the_same_timeline(
    launcher: Launcher, tmp_path: Path
) -> None:
    job = run(launcher, tmp_path, "some_ranks_alone")
    assert job.returncode == 0, job.output
    events = valid_trace(tmp_path / "t" / "trace.json")
    assert [e["pid"] for e in slices_of(events, "strategy.reduce")] == [0, 0, 1, 1, 2, 2]


def test_a_large_trace_is_left_to_the_command(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "large", ranks=2)
    assert job.returncode == 0, job.output
    assert f"mpistrat trace {tmp_path / 't'}" in job.stderr
    assert files(tmp_path / "t") == ["rank-0.part", "rank-1.part"]
    assert merge(str(tmp_path / "t")).is_complete


def test_programs_that_ranks_start_are_not_traced(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, "starts_a_program", ranks=2)
    assert job.returncode == 0, job.output
    assert job.stdout.count("alone") == 2
    assert job.stderr.count("of 2 ranks are in") == 1, job.output
    assert slices_of(valid_trace(tmp_path / "t" / "trace.json"), "strategy.run") == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_the_setting_nothing_of_it_is_loaded(
    launcher: Launcher, tmp_path: Path, ranks: int
) -> None:
    """Nor called: what is not loaded cannot be. `spans` has the object that does nothing."""
    job = run(launcher, tmp_path, "modules", ranks, trace="")
    assert job.returncode == 0, job.output
    loaded = [ast.literal_eval(line) for line in job.stdout.splitlines()]
    assert loaded == [["mpistrat.trace", "mpistrat.trace.spans"]] * ranks
    assert files(tmp_path) == []
