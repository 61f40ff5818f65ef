"""A rank that stops, or dies, in the middle of a step of parameters that it shares with others."""

from pathlib import Path

import pytest

from launch.fault_jobs import assert_says_who, run_with_fault
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


@pytest.mark.long(
    "A stopped rank is waited for until its limit, by three ranks that share the cores."
)
@pytest.mark.parametrize("mpi", MPI_NAMES)
@pytest.mark.parametrize(("fault", "seconds"), [("SIGSTOP", 0.3), ("SIGKILL", 0.47)])
def test_the_job_ends_and_says_who(tmp_path: Path, mpi: str, fault: str, seconds: float) -> None:
    job = run_with_fault(Launcher.named(mpi), tmp_path, 3, PROGRAM, fault, str(seconds))
    assert_says_who(job, 1, 3, fault)
