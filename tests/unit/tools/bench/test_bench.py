"""`mpistrat-bench`: what it counts, and what it refuses."""

import json
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.node.memory import NodeMemory
from mpistrat.tools.bench import operations, pictures, sweep
from mpistrat.tools.bench.command import main
from mpistrat.tools.bench.command_line import number_of_bytes
from mpistrat.tools.bench.operations import OPERATIONS
from mpistrat.tools.bench.report import surroundings, table_report, taken_on
from mpistrat.tools.bench.rounds import all_ranks


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("4K", 4096), ("16m", 16 << 20), ("1GB", 1 << 30)]
)
def test_bytes(text: str, expected: int) -> None:
    assert number_of_bytes(text) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "invalid choice"),
        ([], "required"),
        (["all_reduce", "-b", "much"], "expected bytes such as 4096"),
        (["all_reduce", "-b", "0"], "expected bytes such as 4096"),
        (["all_reduce", "-b", "2M", "-e", "1M"], "is more than --maxbytes"),
        (["all_reduce", "-f", "1"], "--factor: must be at least 2"),
        (["all_reduce", "-n", "0"], "--iters: must be at least 1"),
        (["all_reduce", "-d", "str"], "--dtype: must be a number of NumPy's"),
        (["all_reduce", "-d", "float99"], "--dtype: must be a number of NumPy's"),
        (["broadcast", "--window"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_bus_factors() -> None:
    """Those of nccl-tests."""
    factors = {name: kind.bus_factor(4) for name, kind in OPERATIONS.items()}
    assert factors == {
        "all_reduce": 1.5,
        "broadcast": 1.0,
        "reduce": 1.0,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
    }


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_rank(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    arguments = [name, "-b", "1K", "-e", "4K", "-f", "2", "-n", "3", "--json", str(file)]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "Out of bounds values: 0 OK" in output
    assert "one rank: nothing moves" in output
    content = json.loads(file.read_text())
    assert [row["bytes"] for row in content["rows"]] == [1024, 2048, 4096]
    assert all(len(row["samples"]) == row["calls"] == 3 for row in content["rows"])


class Broken(LocalCommunicator):
    """One bit of each result is another."""

    def all_reduce(self, buffer, reduction="sum", *, out=None, **rest):  # type: ignore[no-untyped-def]
        super().all_reduce(buffer, reduction, out=out, **rest)
        if out is not None:
            out[3] += 1


def test_wrong_results_are_counted() -> None:
    """In the first call and in the last."""
    row = sweep.measure(operations.AllReduceOperation, Broken(), 4096, np.dtype("float32"), calls=4)
    assert row["wrong"] == 2


def test_wrong_results_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operations.AllReduceOperation, "wrong", lambda self: 1)
    assert main(["allreduce", "-e", "4K", "-n", "2"]) == 1
    assert "Out of bounds values: 2 FAILED" in capsys.readouterr().out


def test_an_operand_is_what_it_was_before_each_call() -> None:
    """Sums in place would grow."""

    class Window(NodeMemory):
        def window_buffer(self, nbytes: int) -> np.ndarray:
            self.window = np.empty(nbytes, np.uint8)
            return self.window

    class Doubling(LocalCommunicator):
        memory = Window()

        def all_reduce(self, buffer, reduction="sum", *, out=None, **rest):  # type: ignore[no-untyped-def]
            buffer *= 1 if buffer.ndim == 0 else 2

    communicator = Doubling()
    operation = operations.AllReduceOperation(
        communicator, 4096, np.dtype("float32"), in_window=True
    )
    for _ in range(3):
        operation.reset()
        operation()
    assert operation.wrong() == operation.count  # twice what it must be, not eight times
    assert set(np.unique(communicator.memory.window.view("float32"))) == {2, 4, 6}


def test_a_picture_says_on_how_many_ranks_and_has_the_fit(tmp_path: Path) -> None:
    with mpl.rc_context({"svg.fonttype": "none"}):  # letters, not their outlines
        path = str(tmp_path / "all_reduce.svg")
        times = {"median": [10.9, 19.0, 100.0]}
        operands = ("all_reduce", [1000, 10000, 100000], times, [1.0, 2.0, 10.0])
        pictures.over_sizes(*operands, path, taken_on(surroundings(all_ranks())))
    texts = re.findall(r"<text[^>]*>(.*?)</text>", Path(path).read_text())
    assert any(text.startswith("all_reduce · 1 ranks · ") for text in texts)
    assert any(text.startswith("median: 10 us + 0.9 ns per byte") for text in texts)
    assert {"bytes", "us", "GB/s (algbw)", "all ranks copy as much"} <= {*texts}


def test_files_are_no_argument_of_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results can be handed on: they tell no paths of the machine."""
    path = str(tmp_path / "rows.json")
    arguments = ["all_reduce", "--json", path, "-n", "3", f"--plot={tmp_path}/a.png"]
    monkeypatch.setattr("sys.argv", ["mpistrat-bench", *arguments])
    table_report("rows", [{"us": 1.0}], surroundings(all_ranks())).publish(path)
    content = Path(path).read_text()
    assert json.loads(content)["arguments"] == ["all_reduce", "-n", "3"]
    assert str(tmp_path) not in content
