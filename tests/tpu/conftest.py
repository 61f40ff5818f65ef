"""The XLA suite: torch_xla on its CPU device, in the environment that scripts/test-tpu makes.

A test that is marked mpi is right at 1 and 2 ranks and runs under `mpiexec … pytest --with-mpi`; the rest need none.
torch_xla reads its environment once per process: a test that needs another one starts a child
(`support.xla.child_programs`).
"""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS_PER_TEST = (
    180  # importing torch_xla takes five seconds, on a busy machine several times that
)

os.environ.setdefault("PJRT_DEVICE", "CPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("time_limit") is None:
            item.add_marker(pytest.mark.time_limit(SECONDS_PER_TEST))
