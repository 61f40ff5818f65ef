"""The last words of ranks that fail come out, once, whatever has become of their stderr."""

from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

pytestmark = [pytest.mark.both_mpis("faults"), pytest.mark.waits]

# Each rank has its stderr in another state, and all fail in the same moment. A rank that is to end the job leaves the
# others time to say why they fail.
PROGRAM = """
import io, os, sys
import torch.distributed
import mpistrat as ms
from mpistrat.liveness import deadlines
from mpistrat.liveness.ending import rank_end
from mpi4py import MPI

def wrapped_by_torch():
    group = dict(backend="gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.init_process_group(**group)

def none():
    sys.stderr = None

def closed():
    sys.stderr.close()

def in_memory():
    sys.stderr = io.StringIO()

def full():
    sys.stderr = open("/dev/full", "w")

def without_descriptor():
    os.close(2)

def with_full_descriptor():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)

deadlines.RANK_WAITS_FOR_LAUNCHER_TO_READ = 3.0
ms.MultiWorkerMirroredStrategy()
states = [wrapped_by_torch, none, closed, in_memory, full, without_descriptor, with_full_descriptor]
state = states[MPI.COMM_WORLD.rank]
state()
MPI.COMM_WORLD.Barrier()
raise ValueError(f"of {state.__name__}")
"""
STATES = ("wrapped_by_torch", "none", "closed", "in_memory", "full")
SPOKEN_FOR = ("without_descriptor", "with_full_descriptor")


def test_every_rank_that_fails_is_heard_once(launcher: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    states = STATES + SPOKEN_FOR
    job = launcher.run_python(len(states), program, forked=True)
    assert job.returncode == 1, job.output
    assert job.left_behind == ()
    for rank, state in enumerate(states):
        who = f"mpistrat: rank {rank} of {len(states)} ("
        assert job.stderr.count(who) == 1, f"{state}:\n{job.stderr}"
        assert job.stderr.count(f"ValueError: of {state}\n") == 1, f"{state}:\n{job.stderr}"
