"""A server is killed: `parameter_server_restart.py coordinator|workers SERVERS KILL`, on every rank.

With KILL 1 the job saves a checkpoint, and then its last server dies; with 0 it goes on from that checkpoint. Functions
of a chief, or workers that train by themselves.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.errors import UnavailableError

SECONDS_FOR_STACKS = 60.0  # less than the test waits
SAVED, NOT_SAVED = 20, 10  # how often something is added
LENGTH = 7

pids = MPI.COMM_WORLD.allgather(os.getpid())


def saved_in(**objects: Any) -> ms.checkpoint.CheckpointManager:
    return ms.checkpoint.CheckpointManager(ms.checkpoint.Checkpoint(**objects), "checkpoints")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def expect_unavailable(does: Callable[[], Any]) -> None:
    try:
        while True:
            does()
    except UnavailableError as error:
        say(f"UnavailableError: {error}")


def coordinator(strategy: ms.ParameterServerStrategy, kill: bool) -> None:
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counts = ms.Variable(np.zeros(LENGTH), name="counts")
    manager = saved_in(counts=counts)
    manager.restore_or_initialize()
    if not kill:
        say(f"goes on with {counts.numpy().tolist()}")
        return
    for times in (SAVED, NOT_SAVED):
        for _ in range(times):
            coordinator.schedule(lambda: counts.assign_add(np.arange(float(LENGTH))))
        coordinator.join()
        if times == SAVED:
            manager.save()
    for _ in range(100):
        coordinator.schedule(lambda: (time.sleep(0.01), counts.numpy()))
    os.kill(pids[strategy.extended.job.servers[-1]], signal.SIGKILL)
    expect_unavailable(coordinator.join)


def workers(strategy: Any, kill: bool) -> None:
    job = strategy.extended.job
    first = job.roles.task_id == 0
    with strategy.scope():
        heard = ms.Variable(0, name="heard")  # on the first server, which tells of the checkpoint
        counts = ms.Variable(np.zeros(LENGTH), name="counts")
    manager = saved_in(counts=counts)
    manager.restore_or_initialize()
    if not kill:
        say(f"goes on with {counts.numpy().tolist()}")
        return
    if first:
        for _ in range(SAVED):
            strategy.run(lambda: counts.assign_add(np.arange(float(LENGTH))))
        manager.save()
        heard.assign_add(1)
    while not heard.numpy():
        time.sleep(0.01)
    if not first:
        heard.assign_add(1)
    while first and heard.numpy() < len(job.workers):
        time.sleep(0.01)
    if first:
        os.kill(pids[job.servers[-1]], signal.SIGKILL)
    expect_unavailable(counts.numpy)


def main(who: str, servers: int, kill: bool) -> None:
    faulthandler.dump_traceback_later(SECONDS_FOR_STACKS, exit=True)
    partitioner = ms.experimental.partitioners.FixedShardsPartitioner(servers)
    kinds = ms.ParameterServerStrategy, ms.compat.v1.ParameterServerStrategy
    kind = kinds[who == "workers"]
    strategy = kind(num_ps=servers, variable_partitioner=partitioner)
    (workers if who == "workers" else coordinator)(strategy, kill)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
