"""A rank that stops, or dies, in the middle of a step of parameters that it shares with others."""

import re
import time
from pathlib import Path

import pytest

from support.harness.mpi_launcher import MPI_NAMES, Launcher

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
import mpistrat as ms

fault, seconds = getattr(signal, sys.argv[1]), float(sys.argv[2])
strategy = ms.MultiWorkerMirroredStrategy(gradients="mean", shared_parameters=True)
with strategy.scope():
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()

strategy.run(step)  # what follows has its memory

def strike():
    Path("fault").write_text(str(time.time()))
    os.kill(os.getpid(), fault)

if strategy.extended.communicator.rank == 1:
    threading.Timer(seconds, strike).start()
while True:
    strategy.run(step)
"""
LIMIT = 3.0
SECONDS_TO_END = 5.0  # after the limit


@pytest.mark.parametrize("mpi", MPI_NAMES)
@pytest.mark.parametrize(("fault", "seconds"), [("SIGSTOP", 0.3), ("SIGKILL", 0.47)])
def test_the_job_ends_and_says_who(tmp_path: Path, mpi: str, fault: str, seconds: float) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    began = time.time()
    job = Launcher.named(mpi).run_python(
        3,
        program,
        fault,
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
