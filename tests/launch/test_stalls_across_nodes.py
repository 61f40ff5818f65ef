"""A stall whose cause is on another node, with nodes that MPICH makes up: it deals the ranks out like cards.

Open MPI has no such setting; several of its nodes need a network of their own.
"""

import re
from pathlib import Path

import pytest

from launch.fault_jobs import reports_in, run_with_fault
from support.harness.mpi_launcher import Launcher

pytestmark = pytest.mark.waits

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpistrat as ms
from mpistrat.liveness import processes
processes.job_of = lambda pid: ""  # else the ranks of one launcher would have one observer
os.chdir(sys.argv[2])
strategy = ms.MultiWorkerMirroredStrategy()
rank = strategy.extended.communicator.rank
assert strategy.extended.communicator.contract.watch.peers is None  # the ranks do not share a node
for step in range(5):
    if step == 3 and rank in eval(sys.argv[3]):
        Path("fault").write_text(str(time.time()))
        if sys.argv[1] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # here
    try:
        strategy.reduce(ms.ReduceOp.SUM, np.float32(step), axis=None)
    except ms.errors.StallError as error:
        print(f"rank {rank} caught {error}\\n", end="", flush=True)
        break
"""
HERE = next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# here"))
LIMIT = 2
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}


@pytest.mark.parametrize(
    ("fault", "victims", "cause"),
    [
        ("sleep", "[1]", r"is idle \(\d+ % of a core\)"),
        ("stop", "[1]", r"is stopped \(state T"),
        ("stop", "[3]", r"is stopped \(state T"),
    ],
)
def test_the_missing_rank_is_on_another_node(
    tmp_path: Path, fault: str, victims: str, cause: str
) -> None:
    words = (fault, tmp_path, victims)
    mpich = Launcher.named("MPICH")
    job = run_with_fault(mpich, tmp_path, 4, PROGRAM, *words, limit=LIMIT, env=TWO_NODES)
    victim = victims.strip("[]")
    assert f"allows 2 s): rank {victim} has not come to it\n" in job.stderr, job.output
    assert re.search(rf"\n  rank {victim} of 4 \(\S+, pid \d+\) {cause}", job.stderr), job.output
    assert job.stderr.count("ranks have waited") == 1
    if fault == "sleep":
        assert re.search(rf"program\.py:{HERE} in <module>", job.stderr), job.output
    assert len(reports_in(tmp_path)) == 1


def test_the_ranks_of_all_nodes_can_catch_it(tmp_path: Path) -> None:
    words = ("sleep", tmp_path, "[1]")
    env = {**TWO_NODES, "MPISTRAT_ON_STALL": "raise"}
    mpich = Launcher.named("MPICH")
    # A rank that caught it waits for the others as long again.
    job = run_with_fault(mpich, tmp_path, 4, PROGRAM, *words, limit=LIMIT, waits=2, env=env)
    for rank in (0, 2, 3):
        assert re.search(
            rf"rank {rank} caught ranks have waited .*: rank 1 has not come to it", job.stdout
        ), job.output
    assert "Raising StallError on the ranks that wait" in job.stderr
    assert len(reports_in(tmp_path)) == 1
