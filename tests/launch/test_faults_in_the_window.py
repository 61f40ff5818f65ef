"""A rank that stops, or dies, in the middle of a collective through shared memory, where others wait for its part."""

import re
import time
from pathlib import Path

import pytest

from support.harness.mpi_launcher import MPI_NAMES, Launcher

pytestmark = [pytest.mark.both_mpis("windows"), pytest.mark.waits]

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import mpistrat as ms

fault, victim, seconds = getattr(signal, sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
strategy = ms.MultiWorkerMirroredStrategy()
communicator = strategy.extended.communicator
ordinary = np.ones(1 << 21, np.float32)
window = communicator.window_buffer(ordinary.nbytes).view(np.float32)

def strike():
    Path("fault").write_text(str(time.time()))
    os.kill(os.getpid(), fault)

if communicator.rank == victim:
    threading.Timer(seconds, strike).start()
while True:
    communicator.all_reduce(ordinary, scale=1 / communicator.size)
    window[:] = 1
    communicator.all_reduce(window)
"""
LIMIT = 3.0
SECONDS_TO_END = 5.0  # after the limit


@pytest.mark.parametrize("mpi", MPI_NAMES)
@pytest.mark.parametrize("fault", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("seconds", [0.3, 0.71])
def test_the_job_ends_and_says_who(tmp_path: Path, mpi: str, fault: str, seconds: float) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    began = time.time()
    job = Launcher.named(mpi).run_python(
        3,
        program,
        fault,
        "1",
        str(seconds),
        seconds=45,
        env={"MPISTRAT_STALL_SECONDS": f"{LIMIT:g}"},
        cwd=tmp_path,
    )
    took = began + job.seconds - float((tmp_path / "fault").read_text())
    assert job.returncode != 0, job.output
    assert took < LIMIT + SECONDS_TO_END, job.output
    assert job.left_behind == ()
    how = (
        r"is stopped \(state T"
        if fault == "SIGSTOP"
        else r"was killed by SIGKILL|died without a word"
    )
    assert re.search(rf"rank 1 of 3 \(.+\) ({how})", job.output), job.output
