"""For every test: a time limit that shows all stacks, and result lines for scripts/test; with MPI the ranks agree."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import torchvision_operators
from support.harness.hang_watch import HangWatch
from support.harness.rank_outcomes import Agreement, MPIOutcomes
from support.harness.result_lines import ResultLines, Results, Stopwatch, leave_out
from support.harness.time_limit import TimeLimit
from support.harness.turns import REASONS, leave_to_the_other_mpi


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write a JSON line per started and ended test")
    parser.addoption("--leave-out", type=Path, help="run no test that this --results file names")
    parser.addoption("--run-again", type=Path, help="run those that failed in this --results file")
    parser.addoption(
        "--in-turns",
        action="store_true",
        help="tests that start their own jobs: each under one MPI",
    )


@pytest.hookimpl(trylast=True)  # once pytest's own terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    torchvision_operators.declare_when_imported()
    os.environ.setdefault("MPISTRAT_CACHE", "off")  # a test must not find what another has measured
    config.addinivalue_line("markers", "time_limit(seconds): a test may take longer than usual")
    config.addinivalue_line("markers", f"both_mpis(why): under both MPIs always; {REASONS}")
    config.addinivalue_line("markers", "long(why): why a test takes more than 20 s")
    config.addinivalue_line("markers", "quick: a test under tests/launch for `scripts/test quick`")
    config.addinivalue_line(
        "markers", "gpu: a test that needs a GPU that torch can use, for `scripts/test-gpu`"
    )
    config.addinivalue_line("markers", "alone(why): a launch test that others would disturb")
    config.addinivalue_line("markers", "waits: a launch test that may stand beside others like it")
    config.addinivalue_line("markers", "slurm: a launch test that starts a Slurm of its own")
    config.addinivalue_line("markers", "slow: a test for `scripts/test full` only")
    if config.option.with_mpi:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        folder = world.bcast(_new_folder() if world.rank == 0 else None)
        watch = HangWatch(folder, world.rank)
        config.pluginmanager.register(MPIOutcomes(config, Agreement(world), watch))
        rank = world.rank
    else:
        rank, watch = 0, HangWatch(_new_folder(), rank=0)
    config.pluginmanager.register(TimeLimit(watch))
    config.add_cleanup(watch.close)
    config.pluginmanager.register(Stopwatch())
    if rank == 0:
        config.add_cleanup(lambda: shutil.rmtree(watch.folder, ignore_errors=True))
        if config.option.results and not hasattr(config, "workerinput"):
            config.pluginmanager.register(ResultLines(config.option.results))


def _new_folder() -> Path:
    parent = os.environ.get("MPISTRAT_TEST_OUTPUT")
    return Path(tempfile.mkdtemp(prefix="ranks-", dir=parent))


@pytest.hookimpl(trylast=True)  # what `-m` leaves out has no turn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.in_turns:
        leave_to_the_other_mpi(config, items)
    if config.option.leave_out:
        leave_out(config, items, Results.read(config.option.leave_out).of)
    if config.option.run_again:
        failed = Results.read(config.option.run_again).tests("failed", "started")
        leave_out(config, items, {item.nodeid for item in items}.difference(failed))
    if any("simulated_accelerator" in getattr(item, "fixturenames", ()) for item in items):
        _simulated_accelerator()  # it may take longer than a test may


@pytest.fixture(scope="module", autouse=True)
def _no_search_of_imported_modules() -> None:
    """Leave what is there before a file of tests out of garbage collection: there are 800,000 objects to search."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.accelerator.is_available():
            pytest.skip("needs a GPU that torch can use")


@pytest.fixture(scope="session")
def simulated_accelerator() -> None:
    """For tests whose programs load the simulated accelerator: it is there, or the test is skipped."""
    if why := _simulated_accelerator():
        pytest.skip(why)


def _simulated_accelerator() -> str:
    """Compiles it, where no earlier run has. Returns: why it cannot be had, or ""."""
    from support.simulated_accelerator import build

    try:
        build.library()
    except build.NoCompiler as why:
        return str(why)
    return ""


@pytest.fixture
def sim(simulated_accelerator: None) -> Iterator[Any]:
    """`torch.sim`, which this process then has for good: for a pytest of its own.

    The test fails if it has used device memory without order.
    """
    from support.simulated_accelerator import load

    accelerator = load()
    accelerator.violations()
    yield accelerator
    assert accelerator.violations() == []
