"""The manifest of tests: what a run lacks, and what it forgot to list."""

from pathlib import Path

import pytest

from support.harness import manifest
from support.harness.manifest import Entry, Place

FILE = "tests/mpi/test_it.py"
SUM, SLOW = f"{FILE}::test_sum[1]", f"{FILE}::test_slow"
ENTRIES = [
    Entry(SUM, frozenset({1, 2})),
    Entry(SLOW, frozenset({1}), slow=True),
    Entry("tests/unit/test_b.py::test_b", frozenset({0})),
]


def everything() -> dict[Place, set[str]]:
    """A full run that lacks nothing."""
    runs: dict[Place, set[str]] = {("", 0): {"tests/unit/test_b.py::test_b"}}
    for mpi in ("MPICH", "Open MPI"):
        runs[mpi, 1], runs[mpi, 2] = {SUM, SLOW}, {SUM}
    return runs


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    manifest.save(ENTRIES, tmp_path)
    assert (tmp_path / "mpi.txt").read_text() == f"{FILE}\nslow,1 test_slow\n1,2 test_sum[1]\n"
    assert set(manifest.load(tmp_path)) == set(ENTRIES)


def test_two_lines_cannot_name_the_same_test(tmp_path: Path) -> None:
    """Else a test that is gone could hide behind one that is there."""
    manifest.save([*ENTRIES, Entry(SUM, frozenset({1, 2}))], tmp_path)
    with pytest.raises(ValueError, match=r"two lines of .* name .*test_sum"):
        manifest.load(tmp_path)


def test_a_whole_run_lacks_nothing() -> None:
    assert manifest.lacking(ENTRIES, everything(), full=True) == []
    assert manifest.unlisted(ENTRIES, everything()) == []


@pytest.mark.parametrize("place", [("MPICH", 1), ("Open MPI", 2)])
def test_a_full_run_lacks_a_test_at_one_place(place: Place) -> None:
    runs = everything()
    runs[place].remove(SUM)
    (text,) = manifest.lacking(ENTRIES, runs, full=True)
    assert text == f"{SUM} was not run under {place[0]} at {place[1]} ranks"


def test_the_usual_run_takes_one_mpi_where_they_take_turns() -> None:
    runs = everything()
    runs["MPICH", 1] = set()
    runs["Open MPI", 1].remove(SLOW)  # left to the full run
    assert manifest.lacking(ENTRIES, runs, full=False) == []
    runs["Open MPI", 1] = set()
    assert manifest.lacking(ENTRIES, runs, full=False) == [
        f"{SUM} was not run under MPICH and Open MPI at 1 ranks"
    ]


def test_the_usual_run_takes_both_mpis_with_two_ranks() -> None:
    runs = everything()
    runs["Open MPI", 2] = set()
    assert manifest.lacking(ENTRIES, runs, full=False) == [
        f"{SUM} was not run under Open MPI at 2 ranks"
    ]


def test_a_launch_test_may_be_run_as_its_twin() -> None:
    tests = [f"tests/launch/test_it.py::test_a[{mpi}]" for mpi in ("MPICH", "Open MPI")]
    entries = [Entry(test, frozenset({0})) for test in tests]
    runs = {("", 0): {tests[1]}}
    assert manifest.lacking(entries, runs, full=False) == []
    assert manifest.lacking(entries, runs, full=True) == [f"{tests[0]} was not run"]
    assert len(manifest.lacking(entries, {}, full=False)) == 2


def test_new_tests_are_added_and_none_is_taken_out() -> None:
    new = "tests/mpi/test_it.py::test_new"
    runs = {("MPICH", 1): {new, SUM}, ("MPICH", 3): {SUM}}
    assert manifest.unlisted(ENTRIES, runs) == [new]
    after = {entry.test: entry for entry in manifest.with_new(ENTRIES, runs, {new})}
    assert after[new] == Entry(new, frozenset({1}), slow=True)
    assert after[SUM].ranks == {1, 2, 3}
    assert set(ENTRIES) - set(after.values()) == {ENTRIES[0]}
