"""Which stages a run of scripts/test has: what is tested under which MPI, at how many ranks."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from support.harness.mpi_launcher import MPI_NAMES
from support.harness.rank_outcomes import LARGEST_SIZE_FOR_ALL_TESTS
from support.harness.stage import TOP, Stage
from support.harness.turns import mpi_in_turn, under_both

MODES = ("quick", "usual", "full", "xla")
XLA_PREFIX = "MPISTRAT_TEST_XLA"  # the environment that holds torch_xla, and the oldest torch that we support

_CHOICES = {"quick": "not slow", "usual": "not slow", "full": "", "xla": "not slow"}
_SCRIPTS = ("quickstart", "test", "test-gpu", "test-tpu", "benchmark", "mini-slurm")
# By pytest-xdist, so many at a time: a launch test keeps one and a half of two cores busy, one that waits a half.
_TWO, _FOUR = (("-n", number, "--dist", "worksteal") for number in "24")


def stages(mode: str) -> Iterator[Stage]:
    choice = _CHOICES[mode]
    launch = ["tests/launch", *_in_turns(mode == "full")]
    if mode == "xla":
        yield from _xla_alone(choice, full=True)
        yield from _xla_with_mpi(1, choice, full=True)
        yield from _xla_with_mpi(2, choice, full=True)
        return
    # The longest first: the others fill the cores meanwhile.
    if mode != "quick":
        yield Stage("slurm", pytest=[*launch, "-m", _both(choice, "slurm")], beside_others=True)
        yield from _xla_alone(choice, full=mode == "full")
    yield Stage("unit", pytest=["tests/unit", "-m", choice, *_TWO], beside_others=True)
    yield from _static()
    yield Stage("conformance", pytest=["tests/conformance", "-m", choice], beside_others=True)
    if mode == "quick":
        files = [name for name in _mpi_files(2) if mpi_in_turn(name) == "MPICH"]
        yield Stage("mpi", pytest=[*files, "-m", choice], mpi="MPICH", ranks=2, forked=True)
        yield Stage("launch", pytest=["tests/launch", "-m", "quick and not slow", *_TWO])
        return
    yield from _xla_with_mpi(1, choice, full=mode == "full")
    for ranks in (1, 2, 3, 4, 8):
        yield from _mpi(ranks, choice, full=mode == "full")
    rest = _both(choice, "not slurm and not alone")
    yield Stage("launch", pytest=[*launch, "-m", _both(rest, "not waits"), *_TWO])
    yield Stage("alone", pytest=[*launch, "-m", _both(choice, "not slurm and alone")])
    yield Stage("waits", pytest=[*launch, "-m", _both(rest, "waits"), *_FOUR])
    for ranks in (2, 3, 4):
        for mpi in _mpis(ranks, full=mode == "full"):
            arguments = ["tests/conformance", "-m", choice]
            yield Stage("conformance", pytest=arguments, mpi=mpi, ranks=ranks, forked=True)
    yield from _xla_with_mpi(2, choice, full=mode == "full")
    yield from _old_torch(choice, full=mode == "full")


def _static() -> Iterator[Stage]:
    scripts = [*(f"scripts/{name}" for name in _SCRIPTS), "scripts/environment.sh", ".ci/run"]
    batch_scripts = sorted((TOP / "slurm").glob("*.sbatch"))
    scripts += [str(path.relative_to(TOP)) for path in batch_scripts]
    yield Stage("types", ["mypy", *_of_numpy_2_2()], beside_others=True)
    yield Stage("format", ["ruff", "format", "--check", "."], beside_others=True)
    yield Stage("lint", ["ruff", "check", "."], beside_others=True)
    build = ["sphinx-build", "-q", "-E", "-W", "--keep-going", "docs", "build/docs"]
    yield Stage("docs", build, beside_others=True)
    yield Stage("shell", ["shellcheck", "--external-sources", *scripts], beside_others=True)


def _of_numpy_2_2() -> list[str]:
    """Options of mypy on Python 3.10: the last NumPy for it gives `ndarray` no default parameters."""
    if sys.version_info >= (3, 11):
        return []
    # mypy takes a star in parentheses for a star without them, which 3.10 does not know.
    return ["--python-version", "3.11", "--disable-error-code", "type-arg"]


def _mpi(ranks: int, choice: str, *, full: bool) -> Iterator[Stage]:
    """tests/mpi with so many ranks; where the MPIs take turns, each has its files."""
    all_files = full or under_both("tests/mpi/", ranks)
    for mpi in MPI_NAMES:
        files = _mpi_files(ranks)
        if not all_files:
            files = [name for name in files if mpi_in_turn(name, ranks) == mpi]
        if files:
            arguments = [*files, "-m", choice]
            stage = Stage("mpi", pytest=arguments, mpi=mpi, ranks=ranks, forked=True)
            stage.beside_others = ranks == 1
            yield stage


def _mpi_files(ranks: int) -> list[str]:
    """Those of tests/mpi; with many ranks only what asks for so many: importing the others there takes long."""
    files = sorted((TOP / "tests/mpi").rglob("test_*.py"))
    if ranks > LARGEST_SIZE_FOR_ALL_TESTS:
        files = [file for file in files if _largest_size(file) > LARGEST_SIZE_FOR_ALL_TESTS]
    return [str(file.relative_to(TOP)) for file in files]


def _largest_size(file: Path) -> int:
    """The most ranks that a test in the file asks for."""
    text = file.read_text(encoding="utf-8")
    sizes = [int(size) for size in re.findall(r"min_size=(\d+)", text)]
    return max(sizes, default=1)


def _mpis(ranks: int, *, full: bool) -> tuple[str, ...]:
    """Both, or the one whose turn it is with so many ranks."""
    if full:
        return MPI_NAMES
    return (MPI_NAMES[ranks % len(MPI_NAMES)],)


def _xla_alone(choice: str, *, full: bool) -> Iterator[Stage]:
    """The tests that are not marked mpi; none where there is no torch_xla."""
    if XLA_PREFIX in os.environ:
        chosen = ["tests/tpu", *_in_turns(full), "-m", _both(choice, "not mpi")]
        yield Stage("xla", pytest=chosen, python=_xla_python(), beside_others=True)


def _xla_with_mpi(ranks: int, choice: str, *, full: bool) -> Iterator[Stage]:
    """Those that are marked mpi, with so many ranks."""
    if XLA_PREFIX not in os.environ:
        return
    arguments = ["tests/tpu", "-m", _both(choice, "mpi")]
    for mpi in _mpis(ranks, full=full):
        stage = Stage("xla", pytest=arguments, mpi=mpi, ranks=ranks, python=_xla_python())
        stage.beside_others = ranks == 1
        yield stage


def _old_torch(choice: str, *, full: bool) -> Iterator[Stage]:
    """The backend of torch.distributed, whose methods torch has called by other names."""
    if XLA_PREFIX in os.environ:
        # Its pipelines begin with 8 bytes that are sent where 4 are received.
        not_by_torch = "--deselect=tests/mpi/torch_distributed/test_models.py::test_a_pipeline"
        arguments = ["tests/mpi/torch_distributed", not_by_torch, "-m", choice]
        for mpi in MPI_NAMES if full else MPI_NAMES[:1]:
            yield Stage("old torch", pytest=arguments, mpi=mpi, ranks=2, python=_xla_python())


def _in_turns(full: bool) -> list[str]:
    return [] if full else ["--in-turns"]


def needs_xla(title: str) -> bool:
    """Whether the stage of this title runs only where there is a torch_xla."""
    return title.startswith(("xla", "old torch"))


def _xla_python() -> str:
    return str(Path(os.environ[XLA_PREFIX], "bin", "python"))


def _both(choice: str, other: str) -> str:
    return f"{choice} and {other}" if choice else other
