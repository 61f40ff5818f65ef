"""The tests that have to be run: `tests/manifest/*.txt`, a file for each folder of tests.

The name of each test file has a line, and each of its tests has one below: the numbers of ranks that it is run with,
and its name. 0 is without mpiexec. A test that `scripts/test full` alone runs has `slow` before its numbers:

    tests/mpi/test_variables.py
    1,2,3,4 test_assign[sum]
    slow,8 test_of_many_ranks

Two lines cannot name the same test. `scripts/test manifest` adds new tests; no command takes any out, so a test that is
gone or has another name makes a run fail until a commit changes its line.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.harness.mpi_launcher import MPI_NAMES
from support.harness.turns import twin, under_both

FOLDER = Path(__file__).parents[2] / "manifest"

Place = tuple[str, int]  # an MPI, and a number of ranks; ("", 0) is without mpiexec
Runs = Mapping[Place, set[str]]  # the tests that were run at each place


@dataclass(frozen=True)
class Entry:
    """One test, and where it has to be run."""

    test: str
    ranks: frozenset[int]
    slow: bool = False

    @property
    def line(self) -> str:
        places = ",".join(["slow"] * self.slow + [str(ranks) for ranks in sorted(self.ranks)])
        return f"{places} {self.test.partition('::')[2]}\n"

    def lacks(self, runs: Runs, *, full: bool) -> Iterator[str]:
        """What is missing: every place in a full run, of the usual one what `turns` leaves of them."""
        if self.slow and not full:
            return
        for ranks in sorted(self.ranks):
            mpis = MPI_NAMES if ranks else ("",)
            ran_under = [mpi for mpi in mpis if self.test in runs.get((mpi, ranks), ())]
            if not ranks and not full and twin(self.test) in runs.get(("", 0), ()):
                continue
            if not ran_under or (
                len(ran_under) < len(mpis) and (full or under_both(self.test, ranks))
            ):
                missing = " and ".join(mpi for mpi in mpis if mpi not in ran_under)
                where = f" under {missing} at {ranks} ranks" if ranks else ""
                yield f"{self.test} was not run{where}"


def load(folder: Path = FOLDER) -> list[Entry]:
    entries = [entry for file in sorted(folder.glob("*.txt")) for entry in _read(file)]
    if twice := [test for test, lines in Counter(e.test for e in entries).items() if lines > 1]:
        raise ValueError(f"two lines of {folder} name {twice[0]}; expected one for each test")
    return entries


def _read(file: Path) -> Iterator[Entry]:
    test_file = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not re.match(r"[\d,a-z]+ ", line):
            test_file = line
            continue
        places, _, name = line.partition(" ")
        numbers = places.removeprefix("slow,")
        ranks = frozenset(int(number) for number in numbers.split(","))
        yield Entry(f"{test_file}::{name}", ranks, numbers != places)


def save(entries: Iterable[Entry], folder: Path = FOLDER) -> None:
    """Sorted, so that a change of the manifest shows the tests that it is about."""
    texts: dict[str, list[str]] = {}
    test_file = ""
    for entry in sorted(entries, key=lambda entry: entry.test.split("::")):
        lines = texts.setdefault(entry.test.split("/")[1], [])
        if entry.test.partition("::")[0] != test_file:
            test_file = entry.test.partition("::")[0]
            lines.append(f"{test_file}\n")
        lines.append(entry.line)
    for name, lines in texts.items():
        (folder / f"{name}.txt").write_text("".join(lines), encoding="utf-8")


def lacking(entries: Iterable[Entry], runs: Runs, *, full: bool) -> list[str]:
    return [text for entry in entries for text in entry.lacks(runs, full=full)]


def unlisted(entries: Iterable[Entry], runs: Runs) -> list[str]:
    """Tests that were run, and that nobody would miss."""
    listed = {entry.test for entry in entries}
    return sorted(set().union(*runs.values()) - listed)


def with_new(entries: Iterable[Entry], runs: Runs, slow: set[str]) -> list[Entry]:
    """The entries, and one for each test of `runs` that has none; known tests may have come to new places."""
    known = {entry.test: entry for entry in entries}
    for test in sorted(set().union(*runs.values())):
        ranks = frozenset(number for (_, number), tests in runs.items() if test in tests)
        if test in known:
            old = known[test]
            known[test] = Entry(test, old.ranks | ranks, old.slow)
        else:
            known[test] = Entry(test, ranks, test in slow)
    return list(known.values())
