"""`mpistrat-bench train` on one rank: what it measures, refuses and checks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpistrat.communicators.local import LocalCommunicator
from mpistrat.tools.bench import training
from mpistrat.tools.bench.command import main

pytestmark = pytest.mark.time_limit(180)  # a busy machine takes long to import matplotlib alone


def train(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "row.json"
    command = ["train", "--batch-size", "4", "--steps", "7", *arguments, "--json", str(file)]
    assert main(command) == 0
    row: dict[str, Any] = json.loads(file.read_text())["rows"][0]
    return row


def test_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures follow from the samples, and are those of the table."""
    picture = tmp_path / "picture.png"
    row = train(tmp_path, "--plot", str(picture), "--communication-options", "bytes_per_pack=4096")
    output = capsys.readouterr().out
    samples = {part: np.array(times).max(axis=0) for part, times in row["samples"].items()}
    assert {part: times.shape for part, times in samples.items()} == {
        "step_ms": (7,),
        "input_ms": (7,),
        "compute_ms": (7,),
    }
    for part, times in samples.items():
        assert row[part] == pytest.approx(np.median(times), abs=1e-3)
    exposed = row["step_ms"] - row["input_ms"] - row["compute_ms"]
    assert row["exposed_communication_ms"] == pytest.approx(exposed)
    assert row["samples_per_s"] == pytest.approx(4 / row["step_ms"] * 1e3)
    assert row["gradient_bytes"] == 4 * row["parameters"]
    assert row["communication_options"] == "bytes_per_pack=4096"
    assert f"{row['step_ms']:.2f} ms (p50)" in output
    assert "losses finite: OK" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_efficiency() -> None:
    enough = {"oversubscribed": False, "ranks": 4, "usable_cores": 4}
    assert training.efficiency_of(80.0, 100.0, enough) == (0.8, "")
    efficiency, reason = training.efficiency_of(
        80.0, 100.0, {"oversubscribed": True, "ranks": 4, "usable_cores": 2}
    )
    assert efficiency is None
    assert reason == "4 ranks share 2 cores, and slow each other down"


def test_it_says_why_there_is_no_efficiency(tmp_path: Path) -> None:
    row = train(tmp_path) | {"efficiency": None, "efficiency_refused": "4 ranks share 2 cores"}
    where = {"ranks": 4, "mpi": "", "cpu": "", "usable_cores": 2, "device": ""}
    assert any("not given: 4 ranks share 2 cores" in line for line in training.lines(row, where))


def test_real_input(tmp_path: Path) -> None:
    assert train(tmp_path, "--input", "digits")["input_ms"] > 0
    file = tmp_path / "pictures.npz"
    images = np.random.default_rng(0).integers(0, 256, (20, 5, 6, 3), np.uint8)
    np.savez(file, images=images[..., :1], labels=np.arange(20) % 10)
    assert train(tmp_path, "--input", str(file))["input"] == str(file)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    row = train(tmp_path, "--model", "transformer", "--input", str(text), "--steps", "1")
    assert row["losses_finite"]


@pytest.mark.parametrize(
    ("model", "source", "words"),
    [
        ("mlp", "nowhere", "--input nowhere: "),
        ("transformer", "nowhere", "--input nowhere: "),
        ("transformer", "digits", "this model reads text; give a file"),
        ("mlp", "few.npz", "the 2 examples of few.npz are less than a batch of 4"),
        ("mlp", "labels.npz", "labels from 0 to 11; this model has classes 0 to 9"),
        ("mlp", "shapes.npz", "images of shape [12, 3] and labels of shape [12]; expected"),
        ("mlp", "other.npz", "images"),
    ],
)
def test_input_that_cannot_be(
    model: str,
    source: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("few", images=np.ones((2, 8, 8)), labels=np.zeros(2))
    np.savez("labels", images=np.ones((12, 8, 8)), labels=np.arange(12))
    np.savez("shapes", images=np.ones((12, 3)), labels=np.arange(12))
    np.savez("other", pictures=np.ones((12, 8, 8)))
    assert main(["train", "--model", model, "--input", source, "--batch-size", "4"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "alexnet"], "invalid choice: 'alexnet'"),
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--communication-options", "speed=11"], "unexpected keyword argument 'speed'"),
        (["--communication-options", "bytes_per_pack=-1"], "bytes_per_pack must be >= 0, got -1"),
    ],
)
def test_what_cannot_be(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


class Others(LocalCommunicator):
    """Rank 0 of three; rank 2 has something else."""

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        return [value, value, "other"]


def test_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that have drifted apart are named, and a loss that is not finite fails."""
    module = torch.nn.Linear(3, 3)
    assert training.ranks_that_differ(LocalCommunicator(), module) == []
    assert training.ranks_that_differ(Others(), module) == [2]
    monkeypatch.setattr(training, "ranks_that_differ", lambda *_: [1, 2])
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda logits, _: logits.sum() / 0)
    assert main(["train", "--batch-size", "2", "--steps", "1"]) == 1
    expected = "FAILED: parameters of rank 1, 2 are not rank 0's; a loss is not finite"
    assert expected in capsys.readouterr().out
