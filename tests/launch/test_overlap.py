"""Jobs whose gradients leave while `backward()` runs: which way is taken, and how they end when a rank goes astray."""

import re
import time
from pathlib import Path

import pytest

from support.harness.mpi_launcher import MPI_NAMES, Job, Launcher

pytestmark = [pytest.mark.both_mpis("progress"), pytest.mark.alone("times")]

PROGRAM = """
import sys, time
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
import torch
import mpistrat as ms

overlap = {"asked": True, "measured": None}[sys.argv[2]]
what = sys.argv[3]
torch.set_num_threads(1)
options = ms.CommunicationOptions(overlap=overlap, bytes_per_pack=1)
strategy = ms.MultiWorkerMirroredStrategy(communication_options=options, gradients="sum")
rank = strategy.extended.communicator.rank
with strategy.scope():
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.ones(4, 400)

def step():
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()

def train(steps):
    for _ in range(steps):
        strategy.run(step)

train(5)
if what == "train":
    train(20)
    expected = model[0].weight.grad.clone()
    strategy.extended.communicator.broadcast(expected)
    assert torch.equal(model[0].weight.grad, expected)
    if rank == 0:
        print(strategy.extended.explain(), flush=True)
elif what in ("skip", "caught"):
    try:
        strategy.run(step if rank == 0 else lambda: None)
        strategy.reduce(ms.ReduceOp.SUM, 1.0, axis=None)
    except ms.errors.CollectiveMismatchError as error:
        print(f"noticed at {time.time()} ", flush=True)
        if what == "skip":
            raise
elif what == "die":
    import os, signal
    def die(gradient):
        if rank == 1:
            print(f"dies at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
    model[1].weight.register_hook(die)
    train(1)
"""
SECONDS_TO_END = 12.0  # of which the watchers need three


def run(folder: Path, launcher: Launcher, ranks: int, *arguments: str, **environment: str) -> Job:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    threads = {"OMP_NUM_THREADS": "1"}
    job = launcher.run_python(
        ranks,
        program,
        *arguments,
        seconds=60,
        env=threads | environment,
        # torch looks at the number of threads when it is imported.
        forked=arguments[-1] == "train" and "OMP_NUM_THREADS" not in environment,
    )
    assert job.left_behind == ()
    return job


def how(job: Job) -> str:
    assert job.returncode == 0, job.output
    return next(line for line in job.stdout.splitlines() if line.startswith("gradients are"))


def test_asked_for(tmp_path: Path, launcher: Launcher) -> None:
    job = run(tmp_path, launcher, 2, "multiple", "asked", "train")
    assert how(job) == "gradients are reduced while backward() runs: as asked for"


def test_without_thread_multiple(tmp_path: Path, launcher: Launcher) -> None:
    job = run(tmp_path, launcher, 2, "serialized", "asked", "train")
    why = "MPI was started without MPI_THREAD_MULTIPLE"
    assert how(job) == f"gradients are reduced when backward() has ended: {why}"
    assert (
        job.output.count(
            f"overlap=True, but gradients are reduced when backward() has ended: {why}"
        )
        == 1
    )


def test_one_node_without_a_free_core(tmp_path: Path, launcher: Launcher) -> None:
    job = run(tmp_path, launcher, 3, "multiple", "measured", "train", OMP_NUM_THREADS="64")
    assert how(job).endswith("no core of the node is free, and memory does not wait")


def test_several_nodes_are_measured(tmp_path: Path) -> None:
    """Over messages both ways are timed, and all ranks keep the same one."""
    environment = {"MPIR_CVAR_NUM_CLIQUES": "2"}
    job = run(tmp_path, Launcher.named("MPICH"), 4, "multiple", "measured", "train", **environment)
    assert "ms with overlap, " in how(job)
    assert how(job).endswith(" ms without")


@pytest.mark.parametrize("what", ["skip", "caught"])
def test_a_rank_skips_a_backward(tmp_path: Path, launcher: Launcher, what: str) -> None:
    """All ranks learn of it, though a bucket has left already; who goes on to its end ends the job."""
    began = time.time()
    job = run(tmp_path, launcher, 2, "multiple", "asked", what)
    assert job.returncode != 0, job.output
    noticed = [float(part.split()[0]) for part in job.stdout.split("noticed at ")[1:]]
    assert len(noticed) == 2, job.output
    assert began + job.seconds - min(noticed) < SECONDS_TO_END, job.output
    if what == "caught":
        ended = r"rank 0 of 2 \(.*\) came to its end while a reduction of gradients"
        assert re.search(ended, job.output), job.output


@pytest.mark.parametrize("mpi", MPI_NAMES)
def test_a_rank_dies_while_buckets_are_under_way(tmp_path: Path, mpi: str) -> None:
    began = time.time()
    job = run(tmp_path, Launcher.named(mpi), 3, "multiple", "asked", "die")
    died = float(job.stdout.split("dies at ")[1].split()[0])
    assert job.returncode != 0
    assert began + job.seconds - died < SECONDS_TO_END, job.output
    assert "rank 1 of 3" in job.output, job.output
