"""Every test in this folder is an MPI test: right at 1, 2, 3 and 4 ranks, run under `mpiexec … pytest --with-mpi`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("mpi") is None:
            item.add_marker("mpi")
