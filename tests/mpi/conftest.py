"""Every test in this folder is an MPI test: right at 1, 2, 3 and 4 ranks, run under `mpiexec … pytest --with-mpi`."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.harness.rank_outcomes import LARGEST_SIZE_FOR_ALL_TESTS

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With many ranks, whose imports take long, files without a test that asks for so many are not imported."""
    if collection_path.suffix != ".py" or not config.option.with_mpi:
        return None
    from mpi4py import MPI

    if MPI.COMM_WORLD.size <= LARGEST_SIZE_FOR_ALL_TESTS:
        return None
    sizes = re.findall(r"min_size=(\d+)", collection_path.read_text(encoding="utf-8"))
    return max(map(int, sizes), default=1) <= LARGEST_SIZE_FOR_ALL_TESTS or None


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
