"""Tests that start mpiexec themselves, once under each MPI."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters.slurm_cluster import NoSlurm, SlurmCluster
from support.harness.mpi_launcher import MPI_NAMES, Launcher

HERE = Path(__file__).parent
SECONDS_PER_TEST = 180


@pytest.fixture(params=MPI_NAMES)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """One of the two MPIs; a test that takes it runs under both."""
    return Launcher.named(request.param)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm of its own for the tests of this session, started by the first that takes it."""
    try:
        cluster = SlurmCluster.start(tmp_path_factory.mktemp("slurm"))
    except NoSlurm as why:
        pytest.skip(str(why))
    yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own: jobs leave reports where they are started."""
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("time_limit") is None:
            item.add_marker(pytest.mark.time_limit(SECONDS_PER_TEST))
