"""The text example: it learns, and an interruption changes nothing, whatever number of ranks goes on."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mpistrat.checkpoint.directory import Directory
from mpistrat.checkpoint.stored_checkpoint import StoredCheckpoint
from support.harness.mpi_launcher import Job, Launcher, run_job

TRAIN = Path(__file__).parents[2] / "scripts" / "train_text.py"
SECONDS = 100  # for a run, on a busy machine
BITS_WITHIN = 0.02  # per character


def validation(job: Job) -> list[float]:
    """Bits per character, as reported."""
    assert job.returncode == 0, job.output
    assert job.left_behind == ()
    return [float(bits) for bits in re.findall(r"^step .* validation ([0-9.]+)", job.stdout, re.M)]


def saved(checkpoints: Path, name: str) -> Any:
    """The state of an object in the only checkpoint that is kept."""
    ((path, _),), _ = Directory(checkpoints).checkpoints()
    return StoredCheckpoint(path, {name: None}).state["common"][name]


def equal(first: Path, second: Path) -> bool:
    models = [saved(path, "model") for path in (first, second)]
    return all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.fixture
def small_data(tmp_path: Path) -> Path:
    """Files so different that some ranks have read theirs long before the others: 50 windows in an epoch."""
    folder = tmp_path / "small"
    folder.mkdir()
    for i, windows in enumerate([38, 8, 3, 1]):
        (folder / f"train-{i:02}.txt").write_text("to be or not, " * 5 * windows)
    (folder / "validation.txt").write_text("to be or not, " * 11)
    (folder / "characters.txt").write_text("".join(sorted(set("to be or not, "))))
    return folder


@pytest.mark.long("Two ranks train a transformer until it has learned a bit per character.")
@pytest.mark.time_limit(2 * SECONDS)
def test_it_learns(launcher: Launcher, tmp_path: Path) -> None:
    checkpoint = tmp_path / "text"
    arguments = ["--steps", "30", "--batch-size", "16", "--checkpoint", checkpoint]
    job = launcher.run_python(2, TRAIN, *arguments, seconds=SECONDS, forked=True)
    bits = validation(job)
    data = tmp_path / "text_data"
    characters = len((data / "characters.txt").read_text(encoding="utf-8"))
    assert len(list(data.glob("train-*.txt"))) == 16
    assert bits[0] == pytest.approx(math.log2(characters), abs=1e-3)
    assert bits[-1] < bits[0] - 1
    assert len(job.stdout.partition("A sample:\n")[2]) == 300 + len("\n")
    assert job.stdout.count("A sample:") == 1  # rank 0 alone writes
    assert "bits/character" in job.stderr


@pytest.mark.long("Two ranks train a transformer twice.")
@pytest.mark.time_limit(2 * SECONDS)
def test_bfloat16_between_nodes_learns_as_float32(tmp_path: Path) -> None:
    """Made-up nodes, of a rank each."""

    def train(*wire: str) -> tuple[float, str]:
        checkpoint = tmp_path / f"text{len(wire)}"
        arguments = [*wire, "--steps", "30", "--batch-size", "16", "--checkpoint", checkpoint]
        job = Launcher.named("MPICH").run_python(
            *(2, TRAIN, *arguments, "--explain"),
            seconds=SECONDS,
            env={"MPIR_CVAR_NUM_CLIQUES": "2"},
            forked=True,
        )
        return validation(job)[-1], job.stdout

    expected, plain = train()
    found, explained = train("--wire-dtype", "bfloat16")
    assert "cross the network as ShortFloats(dtype='bfloat16'): up to" in explained
    assert "cross the network as" not in plain
    print(f"{found} bits per character, {expected} with float32")
    assert abs(found - expected) < BITS_WITHIN, (found, expected)


@pytest.mark.time_limit(4 * SECONDS)
def test_it_goes_on_as_if_never_stopped(
    launcher: Launcher, tmp_path: Path, small_data: Path
) -> None:
    """Equal to the last bit: each rank has the files, the optimizer's state and the threads that it had."""

    def train(checkpoint: Path, steps: int) -> list[float]:
        arguments = ["--steps", str(steps), "--checkpoint", checkpoint, "--data", small_data]
        arguments += ["--batch-size", "6"]
        return validation(launcher.run_python(2, TRAIN, *arguments, seconds=SECONDS, forked=True))

    in_one_go = train(tmp_path / "one", 40)
    before = train(tmp_path / "two", 20)
    after = train(tmp_path / "two", 40)
    assert after[0] == before[-1]
    assert after[-1] == in_one_go[-1]
    assert equal(tmp_path / "one", tmp_path / "two")


@pytest.mark.long("Three jobs train a transformer, one after another.")
@pytest.mark.time_limit(5 * SECONDS)
def test_other_numbers_of_ranks_go_on(launcher: Launcher, tmp_path: Path, small_data: Path) -> None:
    """Through the ends of epochs, where ranks get batches without examples."""
    checkpoint = tmp_path / "text"
    options = ["--batch-size", "6", "--checkpoint", str(checkpoint), "--data", str(small_data)]

    def train(ranks: int, steps: int) -> list[float]:
        arguments = [*options, "--steps", str(steps)]
        return validation(
            launcher.run_python(ranks, TRAIN, *arguments, seconds=SECONDS, forked=True)
        )

    on_two = train(2, 5)
    where = saved(checkpoint, "data")
    assert (where["epoch"], where["steps"], where["ranks"]) == (0, 5, 2)
    on_three = train(3, 30)
    assert on_three[0] == pytest.approx(on_two[-1], abs=2e-3)  # in rounding only
    assert saved(checkpoint, "data")["epoch"] > 0

    command = [sys.executable, str(TRAIN), *options, "--steps", "34"]
    alone = validation(run_job(command, launcher.environment(), SECONDS))
    assert alone[0] == pytest.approx(on_three[-1], abs=2e-3)
    assert alone[-1] < on_two[0] - 1


def test_without_resume_it_begins_anew(tmp_path: Path, small_data: Path) -> None:
    environment = Launcher.named("MPICH").environment()
    options = ["--checkpoint", str(tmp_path / "text"), "--data", str(small_data), "--steps", "2"]
    for resume, reports in (([], 2), ([], 1), (["--no-resume"], 2)):
        job = run_job([sys.executable, str(TRAIN), *options, *resume], environment, SECONDS)
        assert len(validation(job)) == reports
