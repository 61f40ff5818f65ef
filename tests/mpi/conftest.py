"""Every test in this folder is an MPI test: right at 1, 2, 3 and 4 ranks, run under `mpiexec … pytest --with-mpi`."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# All programs of these tests are right, unless a test says otherwise: the watch may accuse none of them.
os.environ.setdefault("MPISTRAT_ON_DRIFT", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("mpi") is None:
            item.add_marker("mpi")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Seen by all ranks, and not made yet."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    made = tempfile.mkdtemp(prefix="mpistrat-checkpoints-") if world.rank == 0 else None
    path = Path(world.bcast(made))
    yield path / "saved"
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program drifts apart on purpose: a notice tells of it."""
    monkeypatch.setenv("MPISTRAT_ON_DRIFT", "tell")


@pytest.fixture
def notices() -> Iterator[list[str]]:
    """What the package says for people while the test runs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mpistrat").addHandler(handler)
    yield said
    logging.getLogger("mpistrat").removeHandler(handler)
