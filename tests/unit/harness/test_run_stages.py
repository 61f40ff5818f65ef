"""What a run of scripts/test says of its stages: when it fails as a whole, and what it keeps."""

import json
from pathlib import Path

import pytest

from support.harness import manifest, report, run_stages
from support.harness.manifest import Entry
from support.harness.result_lines import Result
from support.harness.stage import Stage

TEST = "tests/mpi/test_it.py::test_a"


def stages(**of_first: object) -> list[Stage]:
    results = {TEST: Result(TEST, "passed", seconds=23.0, cpu=1.0, why_long="It waits.")}
    return [
        Stage("mpi", pytest=["tests/mpi"], mpi=mpi, ranks=2, results=results, **changes)  # type: ignore[arg-type]
        for mpi, changes in (("MPICH", of_first), ("Open MPI", {}))
    ]


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    entries = [Entry(TEST, frozenset({2}))]
    monkeypatch.setattr(manifest, "load", lambda: entries)
    return entries


def test_nothing_is_wrong() -> None:
    assert list(run_stages.complaints("usual", stages(unsteady=("one",)))) == []


def test_two_unsteady_tests_are_a_failure() -> None:
    (text,) = run_stages.complaints("usual", stages(unsteady=("one", "other")))
    assert text == "2 tests are unsteady, more than 1"


def test_a_test_that_was_not_run_is_a_failure(listed: list[Entry]) -> None:
    listed.append(Entry(f"{TEST}_b", frozenset({2})))
    (text,) = run_stages.complaints("usual", stages())
    assert f"{TEST}_b was not run under MPICH and Open MPI at 2 ranks" in text
    assert list(run_stages.complaints("quick", stages())) == []


def test_a_test_that_is_not_listed_is_a_failure(listed: list[Entry]) -> None:
    listed.clear()
    (text,) = run_stages.complaints("usual", stages())
    assert (
        text
        == f"1 tests are not in tests/manifest, such as {TEST}; scripts/test manifest adds them"
    )


def test_stages_that_leave_a_core_stand_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other's file."""
    wait = "for i in $(seq 100); do [ -e {} ] && exit 0; sleep 0.1; done; exit 1"
    files = [tmp_path / "a", tmp_path / "b"]
    commands = [
        ["sh", "-c", f"touch {mine}; {wait.format(other)}"]
        for mine, other in (files, reversed(files))
    ]
    some = [Stage("some", command, beside_others=True) for command in commands]
    run_stages.run_all(some)
    assert [stage.failed for stage in some] == [0, 0]


def test_the_table_and_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = stages(seconds=4.0, passed=1)
    report.show_stages(some, 5.0)
    report.show_slowest(some)
    shown = capsys.readouterr().out
    assert "mpi          MPICH         2       1       0      4.0\n" in shown
    row = f"    23.0    22.0  {TEST}  (MPICH 2)\n"
    assert row + " " * 18 + "It waits.\n" in shown
    report.save(tmp_path / "kept.json", "usual", some, 5.0)
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert (kept["mode"], kept["seconds"]) == ("usual", 5.0)
    assert kept["stages"][0]["tests"] == [
        {
            "test": TEST,
            "outcome": "passed",
            "seconds": 23.0,
            "cpu": 1.0,
            "why_long": "It waits.",
            "idle": 22.0,
        }
    ]
