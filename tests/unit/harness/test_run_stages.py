"""What a run of scripts/test says of its stages: when it fails as a whole, and what it keeps."""

import json
from pathlib import Path

import pytest

from support.harness import manifest, matrix, report, run_stages
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
def numbers(monkeypatch: pytest.MonkeyPatch) -> manifest.Numbers:
    """The manifest's numbers for the stages above."""
    numbers = {"mpi MPICH 2": 1, "mpi Open MPI 2": 1}
    monkeypatch.setattr(manifest, "load", lambda: {"usual": numbers})
    return numbers


def test_nothing_is_wrong() -> None:
    assert list(run_stages.complaints("usual", stages(unsteady=("one",)))) == []


def test_two_unsteady_tests_are_a_failure() -> None:
    (text,) = run_stages.complaints("usual", stages(unsteady=("one", "other")))
    assert text == "2 tests are unsteady, more than 1"


def test_another_number_of_tests_is_a_failure(numbers: manifest.Numbers) -> None:
    numbers["mpi MPICH 2"] = 2
    (text,) = run_stages.complaints("usual", stages())
    assert text == (
        "mpi MPICH 2: 1 tests were run, and tests/manifest/numbers.json has 2; "
        "scripts/test manifest writes the number that is right"
    )
    assert list(run_stages.complaints("quick", stages())) == []


@pytest.mark.parametrize("title", ["xla", "xla MPICH 2", "old torch MPICH 2"])
def test_stages_of_torch_xla_are_run_where_it_is(
    numbers: manifest.Numbers, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    numbers[title] = 3
    monkeypatch.delenv(matrix.XLA_PREFIX, raising=False)
    assert list(run_stages.complaints("usual", stages())) == []
    monkeypatch.setenv(matrix.XLA_PREFIX, "folder")
    (text,) = run_stages.complaints("usual", stages())
    assert text.startswith(f"{title}: 0 tests were run, and tests/manifest/numbers.json has 3;")


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
