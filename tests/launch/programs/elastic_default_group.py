"""Training that goes on without rank 1, with torch's default group: `elastic_default_group.py WHO`.

WHO makes the group: "strategy"; "program", before training; "train", at each beginning of training. Rank 1 is killed
when the others wait for it, in a collective of the default group or of a group of its ranks. Each rank that is left
prints how many ranks the groups had, step by step.
"""

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpistrat as ms

WHO = sys.argv[1]
STEPS = 6
seen: list[str] = []


def begin() -> None:
    dist.init_process_group("mpistrat", init_method="mpi://")


def count(group: Any, async_op: bool = False) -> int:
    ones = torch.ones(1, dtype=torch.int64)
    work = dist.all_reduce(ones, group=group, async_op=async_op)
    if work is not None:
        work.wait()
    return int(ones)


def train(elastic: ms.fault_tolerance.Elastic) -> None:
    if WHO == "train":
        begin()
    strategy = elastic.strategy(torch_distributed=True)
    replicas = strategy.num_replicas_in_sync
    assert [dist.get_rank(), dist.get_world_size()] == [elastic.comm.rank, replicas]
    group = dist.new_group(range(replicas))
    with strategy.scope():
        elastic.restore(ms.checkpoint.Checkpoint())
    while elastic.step < STEPS:
        if elastic.step == 3 and MPI.COMM_WORLD.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        by_step = count(None if WHO == "strategy" else group, async_op=WHO == "train")
        elastic.commit()
        seen.append(str(by_step))


if __name__ == "__main__":
    if WHO == "program":
        begin()
    ms.fault_tolerance.run_elastic(train)
    sys.stdout.write(" ".join(seen) + "\n")
