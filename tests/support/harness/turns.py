"""Which MPI a test is run under where `scripts/test` does not take both: they take turns, by a stable hash.

The hash is of what the test is called, so that a test keeps its MPI from run to run, and the tests of every part of the
library are dealt out to both. CONTRIBUTING.md says why this catches what the whole matrix catches.
"""

import zlib

import pytest

from support.harness.mpi_launcher import MPI_NAMES

# What differs between MPIs, so that launch tests that touch it are run under both: `@pytest.mark.both_mpis(why)`.
REASONS = ("launching", "faults", "windows", "progress")
_RANKS_UNDER_BOTH = (2,)  # the smallest sum


def mpi_in_turn(name: str, ranks: int = 0) -> str:
    """The MPI of the test, or file of tests, `name`. With an odd number of ranks it is the other MPI."""
    turn = zlib.crc32(name.encode()) + ranks
    return MPI_NAMES[turn % len(MPI_NAMES)]


def under_both(test: str, ranks: int) -> bool:
    """Whether the usual run, too, takes both MPIs for this test at this number of ranks."""
    return test.startswith("tests/mpi/") and ranks in _RANKS_UNDER_BOTH


def twin(test: str) -> str:
    """The same launch test under the other MPI; another text if the test does not name one."""
    mpich, open_mpi = MPI_NAMES
    return test.replace(mpich, "\0").replace(open_mpi, mpich).replace("\0", open_mpi)


def leave_to_the_other_mpi(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of launch tests that exist for each MPI, and are not marked both_mpis, leave out those whose turn it is not."""
    names = {item.nodeid for item in items}
    left_out = [
        item
        for item in items
        if item.nodeid != twin(item.nodeid) in names and not _has_its_turn(item)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _has_its_turn(item: pytest.Item) -> bool:
    if mark := item.get_closest_marker("both_mpis"):
        if mark.args not in {(reason,) for reason in REASONS}:
            raise pytest.UsageError(
                f"{item.nodeid}: both_mpis{mark.args}, expected one of {REASONS}"
            )
        return True
    own = item.nodeid
    other = twin(own)
    of_both = "".join(sorted((own, other)))
    return MPI_NAMES[own > other] == mpi_in_turn(of_both)
