"""How many tests each stage of `scripts/test` has to run: `tests/manifest/numbers.json`.

A stage is named by its kind, its MPI and its number of ranks, such as "mpi MPICH 3". A test that is new, gone, or left
out by a mistake changes a number. `scripts/test manifest` collects all tests and writes the numbers anew: the commit
that changes them shows by how many.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from support.harness.stage import Stage

FILE = Path(__file__).parents[2] / "manifest" / "numbers.json"
MODES = ("usual", "full")  # the modes of `scripts/test` that have numbers

Numbers = dict[str, int]  # from the title of a stage to its number of tests


def load(file: Path = FILE) -> dict[str, Numbers]:
    """The numbers of each mode."""
    numbers: dict[str, Numbers] = json.loads(file.read_text(encoding="utf-8"))
    return numbers


def save(numbers: Mapping[str, Numbers], file: Path = FILE) -> None:
    file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def numbers_of(stages: Iterable[Stage]) -> Numbers:
    """How many tests each stage ran, or collected."""
    return {stage.title: len(stage.results) for stage in stages if stage.pytest}


def differences(expected: Numbers, found: Numbers) -> Iterator[str]:
    """A sentence for each stage that ran another number of tests than it has to run."""
    for title in sorted({*expected, *found}):
        ran = found.get(title, 0)
        listed = expected.get(title, 0)
        if ran != listed:
            yield f"{title}: {ran} tests were run, and tests/manifest/numbers.json has {listed}"
