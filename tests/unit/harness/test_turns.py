"""MPIs take turns: each test has one, both have about as many, and what is marked is run under both."""

import pytest

from support.harness.mpi_launcher import MPI_NAMES
from support.harness.turns import leave_to_the_other_mpi, mpi_in_turn, twin

pytest_plugins = ["pytester"]

TESTS = """
import pytest
mpis = pytest.mark.parametrize("mpi", ["MPICH", "Open MPI"])
@mpis
@pytest.mark.parametrize("number", range(40))
def test_alike(mpi, number): pass
@mpis
@pytest.mark.both_mpis("faults")
def test_unlike(mpi): pass
@pytest.mark.parametrize("mpi", ["MPICH"])
def test_of_one(mpi): pass
def test_without(): pass
"""


def chosen(pytester: pytest.Pytester, tests: str) -> list[str]:
    pytester.makeini("[pytest]\nmarkers = both_mpis(why): under both")
    items, _ = pytester.inline_genitems(pytester.makepyfile(tests))
    leave_to_the_other_mpi(pytester.parseconfig(), items)
    return [item.name for item in items]


def test_each_test_is_run_once_and_marked_ones_twice(pytester: pytest.Pytester) -> None:
    names = chosen(pytester, TESTS)
    alike = [name for name in names if name.startswith("test_alike")]
    assert len(alike) == len({name.split("-")[0] for name in alike}) == 40
    by_mpi = [sum(mpi in name for name in alike) for mpi in MPI_NAMES]
    assert min(by_mpi) > 10, by_mpi
    assert names[-4:] == [
        "test_unlike[MPICH]",
        "test_unlike[Open MPI]",
        "test_of_one[MPICH]",
        "test_without",
    ]


def test_a_reason_that_is_none(pytester: pytest.Pytester) -> None:
    with pytest.raises(pytest.UsageError, match="expected one of"):
        chosen(pytester, TESTS.replace('"faults"', '"it is slow"'))


def test_a_turn_is_the_same_everywhere() -> None:
    """Python's own hash differs from process to process."""
    assert mpi_in_turn("tests/mpi/test_variables.py") == "MPICH"
    assert mpi_in_turn("tests/mpi/pytorch/test_backward.py") == "Open MPI"
    assert twin("test_a[MPICH-3]") == "test_a[Open MPI-3]"
    assert twin(twin("test_a[MPICH-3]")) == "test_a[MPICH-3]"
