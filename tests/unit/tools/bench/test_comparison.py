"""Contestants in one run: who takes part, that all do the same work, and what is kept."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from mpistrat.tools.bench import comparison
from mpistrat.tools.bench.comparison import compare_all_reduce, compare_training, operand
from mpistrat.tools.bench.report import surroundings, table, table_report
from mpistrat.tools.bench.rounds import all_ranks, compare, medians


def test_rounds() -> None:
    """Contestants take turns, each as often."""
    calls: list[str] = []
    rounds = compare(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeat=3, num_rounds=5
    )
    assert "".join(calls) == "aabb" + 5 * "aaabbb"
    assert {name: len(times) for name, times in rounds.items()} == {"a": 5, "b": 5}
    assert medians({"a": [5.0, 1.0, 2.0]}) == {"a": 2.0}


def test_turns_last_long_enough_to_be_measured() -> None:
    calls: list[int] = []
    compare({"a": lambda: calls.append(1)}, num_rounds=1)
    assert len(calls) > 1000


def test_a_peer_that_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "PEERS", [("horovod", "no_such_package", "Horovod")])
    assert comparison.contestants_of_peers("all_reduces", np.ones(3)) == (
        {},
        {"Horovod": "not installed"},
    )


def test_a_peer_that_cannot_take_part_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(array: np.ndarray) -> None:
        raise comparison.CannotTakePart("sees 1 of 2 ranks")

    there = types.SimpleNamespace(all_reduces=cannot)
    monkeypatch.setitem(sys.modules, "mpistrat.tools.bench.peers.horovod", there)
    monkeypatch.setattr(comparison, "PEERS", [("horovod", "numpy", "Horovod")])
    assert comparison.contestants_of_peers("all_reduces", np.ones(3)) == (
        {},
        {"Horovod": "sees 1 of 2 ranks"},
    )


def test_losses_that_differ_are_wrong() -> None:
    rows = compare_training(
        {
            "one rank alone": lambda: 1.0,
            "peer": lambda: 2.00001,
            "broken": lambda: 2.01,
            "mpistrat": lambda: 2.0,
        },
        num_rounds=3,
    )
    assert {row["training step"]: row["wrong"] for row in rows} == {
        "one rank alone": False,  # it trains on a batch of its own
        "peer": False,
        "broken": True,
        "mpistrat": False,
    }
    assert all(len(row["samples"]) == 3 for row in rows)


def test_sums_that_are_wrong_are_counted() -> None:
    right = operand(256, 0, 1)
    changed = right.copy()
    changed[:3] += 1
    contestants = {
        "MPI": lambda: right,
        "ordinary": lambda: changed,
        "in the window": lambda: right,
        "copy": lambda: None,
    }
    row = compare_all_reduce(1024, contestants, num_rounds=2)
    assert row["wrong"] == 3
    assert row["MPI / ordinary"] == pytest.approx(row["MPI us"] / row["ordinary us"])
    assert "gloo / window" not in row
    assert {name: len(times) for name, times in row["samples"].items()} == dict.fromkeys(
        contestants, 2
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_operands_add_up_to_zeros(ranks: int) -> None:
    operands = [operand(7, rank, ranks) for rank in range(ranks)]
    assert operands[0].all()
    assert not sum(operands).any()  # type: ignore[union-attr]


def test_tables_and_files_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"who": "mpistrat", "us": 1.234, "samples": [1.2, 1.234, 1.3]},
        {"who": "peer", "us": 2.5, "limit us": 3.0, "samples": [2.5]},
    ]
    file = tmp_path / "rows.json"
    where = surroundings(all_ranks())
    table_report("a comparison", rows, where, {"Horovod": "not installed"}).publish(str(file))
    content = json.loads(file.read_text())
    assert content["schema"] == 1
    assert content["rows"] == rows
    assert content["left_out"] == {"Horovod": "not installed"}
    assert content["surroundings"]["ranks"] == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("a comparison · 1 ranks")
    assert (
        lines[2:5]
        == table(content["rows"])
        == [
            "     who    us  limit us",
            "mpistrat  1.23         -",
            "    peer  2.50      3.00",
        ]
    )
    assert lines[5] == "Horovod: skipped, not installed"
