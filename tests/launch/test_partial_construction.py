"""A strategy that only some ranks build, while the others end or go on, is an error and not a hang."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Job, Launcher

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

STRATEGY = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpistrat as ms
rank = MPI.COMM_WORLD.rank
"""


def run(launcher: Launcher, folder: Path, program: str, ranks: int = 3) -> Job:
    path = folder / "program.py"
    path.write_text(STRATEGY + program)
    job = launcher.run_python(ranks, path, env={"MPISTRAT_START_SECONDS": "2"}, seconds=60)
    assert job.returncode != 0, job.output
    assert "should not be reached" not in job.output
    assert job.seconds < 30
    assert not job.left_behind
    return job


def test_the_others_end(launcher: Launcher, tmp_path: Path) -> None:
    """MPI_Finalize waits for the ranks that build; these give up."""
    program = "if rank > 0: ms.MultiWorkerMirroredStrategy(); print('should not be reached')\n"
    job = run(launcher, tmp_path, program)
    assert "waited 2 s in the first collective call on this communicator" in job.stderr
    assert "Every rank must build the strategy" in job.stderr


def test_the_others_are_busy(launcher: Launcher, tmp_path: Path) -> None:
    program = """
if rank == 0:
    time.sleep(100)
ms.MultiWorkerMirroredStrategy()
print('should not be reached')
"""
    job = run(launcher, tmp_path, program)
    assert "waited 2 s in the first collective call on this communicator" in job.stderr


@pytest.mark.quick
def test_a_second_strategy_while_the_others_end(launcher: Launcher, tmp_path: Path) -> None:
    """Once there is one strategy, nobody has to wait for a limit."""
    program = """
ms.MultiWorkerMirroredStrategy()
if rank == 1:
    ms.MirroredStrategy()
    print('should not be reached')
"""
    job = run(launcher, tmp_path, program)
    assert "constructor of MirroredStrategy" in job.stderr
    assert "program.py:10" in job.stderr  # where rank 1 waits


@pytest.mark.quick
def test_a_second_strategy_while_the_others_reduce(launcher: Launcher, tmp_path: Path) -> None:
    program = """
strategy = ms.MultiWorkerMirroredStrategy()
if rank == 1:
    ms.MultiWorkerMirroredStrategy()
else:
    strategy.reduce("sum", np.ones(3), axis=None)
print('should not be reached')
"""
    job = run(launcher, tmp_path, program)
    assert "CollectiveMismatchError" in job.stderr
    assert "rank 1: barrier(constructor of MultiWorkerMirroredStrategy" in job.stderr
    assert "all_reduce(sum, float64, (3,), SUM)" in job.stderr
