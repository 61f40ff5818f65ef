"""A rank that does not come to where the others wait: it is named with its line, and so is the line of the others."""

import re
from pathlib import Path

import pytest

from launch.fault_jobs import HOST_AND_PID
from support.harness.mpi_launcher import Job, Launcher

pytestmark = pytest.mark.waits

RUN = ("-m", "mpistrat", "run")
LIMIT = {"MPISTRAT_STALL_SECONDS": "0.5"}
SECONDS_TO_END = 20.0  # of a job, with its start

GROUPS = """
import datetime, os, sys, time
import torch.distributed as dist
what, rank = sys.argv[1], int(os.environ["RANK"])
if what in ("again", "some"):
    dist.init_process_group("gloo")
if what == "again":
    dist.destroy_process_group()
if rank == 1 and what == "ended":
    sys.exit(0)  # there
if rank == 1:
    time.sleep(600)  # there
if what == "again":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))  # here
if what == "some":
    dist.new_group([2, 1])  # here
else:
    dist.init_process_group("gloo")  # here
assert rank == 0 and what == "some"
"""


def at(mark: str) -> str:
    """A pattern of the lines of GROUPS that end with this comment."""
    lines = [n for n, line in enumerate(GROUPS.splitlines(), 1) if line.endswith(f"  # {mark}")]
    return rf"\S*program\.py:({'|'.join(map(str, lines))}) in <module>"


def run(
    launcher: Launcher, folder: Path, program: str, *words: str | Path, ranks: int = 2, **env: str
) -> Job:
    """The program must fail in time, and leave no process behind."""
    path = folder / "program.py"
    path.write_text(program)
    forked = bool(words)  # then torch is imported
    job = launcher.run_python(
        ranks, *words[:-1], path, *words[-1:], env=env, cwd=folder, forked=forked, seconds=60
    )
    assert job.returncode not in (0, 63), job.output
    assert job.seconds < SECONDS_TO_END, job.output
    assert job.left_behind == (), job.output
    assert "AssertionError" not in job.stderr
    return job


def says(job: Job, *pattern: str) -> None:
    assert re.search("".join(pattern), job.stderr), job.output


@pytest.mark.both_mpis("faults")
def test_a_rank_that_has_ended_with_0(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, GROUPS, *RUN, "ended")
    says(job, rf"rank 1 of 2{HOST_AND_PID} called sys\.exit\(0\) at ", at("there"), ", but another")
    waits = rf"rank 0 of 2{HOST_AND_PID}: in collective number 1, init_process_group\(\)\n      at "
    says(job, waits, at("here"))


@pytest.mark.both_mpis("faults")
def test_a_rank_that_does_not_come(launcher: Launcher, tmp_path: Path) -> None:
    job = run(launcher, tmp_path, GROUPS, *RUN, "first", **LIMIT)
    names_rank_1(job, 2)
    says(job, r"\n  rank 0 waits in collective number 1: init_process_group\(\)\n +at ", at("here"))


def test_a_rank_that_does_not_come_to_a_group_of_some(launcher: Launcher, tmp_path: Path) -> None:
    """These have no communicator yet; torch sorts them."""
    job = run(launcher, tmp_path, GROUPS, *RUN, "some", ranks=3, **LIMIT)
    names_rank_1(job, 3)
    says(job, r"\n  rank 2 waits in collective number 1: new_group\(\[1, 2\]\)\n +at ", at("here"))


def names_rank_1(job: Job, ranks: int) -> None:
    says(job, r"\(MPISTRAT_STALL_SECONDS allows 0\.5 s\): rank 1 has not come to it\n")
    says(job, rf"\n  rank 1 of {ranks}{HOST_AND_PID} is (idle|busy) (.|\n)*?\n      ", at("there"))


def test_the_timeout_of_a_group_that_takes_the_place_of_another(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The ranks that wait raise an error, and can save what they have."""
    job = run(launcher, tmp_path, GROUPS, *RUN, "again")
    says(job, r"\(the timeout of their group is 1 s\): rank 1 has not come to it\n")
    says(
        job,
        r"\n  rank 0 waits in collective number \d+: init_process_group\(\)\n.* at ",
        at("here"),
    )
    says(
        job, r"StallError: rank 0 waited 1\.\d s for the other ranks, and the timeout of its group"
    )


OTHER_PROGRAM = """
import os
import numpy as np
import mpistrat as ms
strategy = ms.MultiWorkerMirroredStrategy()
def step():
    ms.get_replica_context().all_reduce(ms.ReduceOp.SUM, np.ones(10))
strategy.run(step)
if strategy.extended.communicator.rank == 1:
    os.execv("/bin/sleep", ["sleep", "600"])
strategy.run(step)
"""


def test_a_rank_that_has_become_another_program(launcher: Launcher, tmp_path: Path) -> None:
    """The signal that asks a rank for its stack would kill it."""
    job = run(launcher, tmp_path, OTHER_PROGRAM, **LIMIT)
    says(job, "rank 1 has not come to it\n")
    says(
        job,
        rf"\n  rank 1 of 2{HOST_AND_PID} has become another program, by exec: sleep 600; it had",
    )


OWN_RANKS = """
import os, threading
import torch.distributed as dist
import torch.multiprocessing as mp
def work(rank, size):
    threading.Timer(2, os._exit, [1]).start()  # else it waits for ever
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    # As in a process that has imported torch alone, which takes longer.
    dist.init_process_group.__wrapped__("gloo", rank=rank, world_size=size)
mp.start_processes(work, args=(2,), nprocs=1, start_method="fork")
"""


def test_a_program_that_starts_ranks_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    """Once, and by one rank; nothing ends for it."""
    job = run(launcher, tmp_path, OWN_RANKS, *RUN, "", **LIMIT)
    line = OWN_RANKS.splitlines().index(OWN_RANKS.splitlines()[-1]) + 1
    notice = (
        rf"mpistrat: rank 0 has waited 1 s for processes that it started, at \S*program\.py:{line} "
    )
    says(
        job,
        notice,
        r".* the ranks are started already, by mpiexec, mpirun or srun\..*`mpistrat run`\n",
    )
    assert job.stderr.count("are started already") == 1
