"""The manifest of tests: how many each stage has to run."""

from pathlib import Path

from support.harness import manifest, matrix
from support.harness.result_lines import Result
from support.harness.stage import Stage

NUMBERS = {"unit": 2, "mpi MPICH 3": 1}


def test_numbers_that_are_saved_are_read(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    manifest.save({"usual": NUMBERS}, file)
    assert manifest.load(file) == {"usual": NUMBERS}


def test_a_stage_is_counted_by_its_mpi_and_its_ranks() -> None:
    tests = ("tests/mpi/test_it.py::test_a", "tests/mpi/test_it.py::test_b")
    results = {test: Result(test, "skipped") for test in tests}
    stages = [
        Stage("mpi", pytest=["tests/mpi"], mpi="MPICH", ranks=3, results=results),
        Stage("lint", ["ruff"]),
    ]
    assert manifest.numbers_of(stages) == {"mpi MPICH 3": 2}


def test_a_run_with_these_numbers_differs_in_nothing() -> None:
    assert list(manifest.differences(NUMBERS, dict(NUMBERS))) == []


def test_both_numbers_are_said() -> None:
    found = {"unit": 3, "mpi Open MPI 3": 1}
    assert list(manifest.differences(NUMBERS, found)) == [
        "mpi MPICH 3: 0 tests were run, and tests/manifest/numbers.json has 1",
        "mpi Open MPI 3: 1 tests were run, and tests/manifest/numbers.json has 0",
        "unit: 3 tests were run, and tests/manifest/numbers.json has 2",
    ]


def test_each_stage_of_both_modes_has_a_number() -> None:
    """Where there is no torch_xla its stages are missing here, and are left out of the comparison."""
    numbers = manifest.load()
    for mode in manifest.MODES:
        listed = {title for title in numbers[mode] if not matrix.needs_xla(title)}
        stages = [stage for stage in matrix.stages(mode) if stage.pytest]
        assert listed == {s.title for s in stages if not matrix.needs_xla(s.title)}
