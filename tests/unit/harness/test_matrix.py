"""What the usual run and the full one test under which MPI, at how many ranks."""

import itertools
from collections import Counter

import pytest

from support.harness import matrix
from support.harness.mpi_launcher import MPI_NAMES
from support.harness.stage import TOP

EVERYTHING = {str(file.relative_to(TOP)) for file in (TOP / "tests/mpi").rglob("test_*.py")}


def files_at(mode: str, ranks: int) -> Counter[str]:
    """How many MPIs each file of tests/mpi is run under."""
    some = [stage for stage in matrix.stages(mode) if stage.name == "mpi" and stage.ranks == ranks]
    assert len({stage.mpi for stage in some}) == len(some)
    return Counter(file for stage in some for file in stage.pytest if file.startswith("tests/"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_files_are_run_under_one_mpi_or_both(ranks: int) -> None:
    mpis = len(MPI_NAMES) if ranks == 2 else 1
    assert files_at("usual", ranks) == dict.fromkeys(EVERYTHING, mpis)
    assert files_at("full", ranks) == dict.fromkeys(EVERYTHING, len(MPI_NAMES))


def test_a_file_is_run_under_both_mpis_with_more_than_two_ranks() -> None:
    runs = [
        (file, stage.mpi)
        for stage in matrix.stages("usual")
        if stage.name == "mpi" and stage.ranks in (3, 4)
        for file in stage.pytest
        if file.startswith("tests/")
    ]
    assert sorted(runs) == sorted((file, mpi) for file in EVERYTHING for mpi in MPI_NAMES)


def test_eight_ranks_import_only_what_asks_for_them() -> None:
    assert files_at("usual", 8) == {"tests/mpi/test_eight_ranks.py": 1}
    assert files_at("full", 8) == {"tests/mpi/test_eight_ranks.py": 2}


@pytest.mark.parametrize("mode", ["usual", "full"])
def test_a_launch_test_is_of_one_stage(mode: str) -> None:
    """This holds for each combination of the three marks."""
    marks = ("slurm", "alone", "waits")
    choices = [
        stage.pytest[stage.pytest.index("-m") + 1]
        for stage in matrix.stages(mode)
        if "tests/launch" in stage.pytest
    ]
    assert len(choices) == len(marks) + 1
    for has in itertools.product([False, True], repeat=len(marks)):
        names = {"slow": False, **dict(zip(marks, has, strict=True))}
        assert sum(bool(eval(choice, {}, names)) for choice in choices) == 1, names


def test_both_mpis_have_conformance_and_launch_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(matrix.XLA_PREFIX, "of torch_xla")
    usual, full = ([*matrix.stages(mode)] for mode in ("usual", "full"))
    for stages, mpis in ((usual, 1), (full, 2)):
        ranks = Counter(stage.ranks for stage in stages if stage.name == "conformance")
        assert ranks == {0: 1, 2: mpis, 3: mpis, 4: mpis}
    of_turns = [stage.name for stage in usual if "--in-turns" in stage.pytest]
    assert of_turns == ["slurm", "xla", "launch", "alone", "waits"]
    assert not any("--in-turns" in stage.pytest for stage in full)
