"""A rank that stops, or dies, in the middle of a collective through shared memory, where others wait for its part."""

from pathlib import Path

import pytest

from launch.fault_jobs import assert_says_who, run_with_fault
from support.harness.mpi_launcher import MPI_NAMES, Launcher

pytestmark = [pytest.mark.both_mpis("windows"), pytest.mark.waits]

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import mpistrat as ms
from mpistrat.communicators import reducing

fault, victim, seconds = getattr(signal, sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
strategy = ms.MultiWorkerMirroredStrategy()
communicator = strategy.extended.communicator
ordinary = np.ones(1 << 21, np.float32)
window = communicator.memory.window_buffer(ordinary.nbytes).view(np.float32)

def strike():
    Path("fault").write_text(str(time.time()))
    os.kill(os.getpid(), fault)

if communicator.rank == victim:
    threading.Timer(seconds, strike).start()
while True:
    communicator.all_reduce(ordinary, reducing(scale=1 / communicator.size))
    window[:] = 1
    communicator.all_reduce(window)
"""


@pytest.mark.parametrize("mpi", MPI_NAMES)
@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("seconds", [0.3, 0.71])
def test_the_job_ends_and_says_who(tmp_path: Path, mpi: str, fault: str, seconds: float) -> None:
    job = run_with_fault(Launcher.named(mpi), tmp_path, 3, PROGRAM, fault, "1", str(seconds))
    assert_says_who(job, 1, 3, fault)
