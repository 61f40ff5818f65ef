"""A job that is traced, or is not: `traced.py SCENARIO`, on every rank."""

import os
import resource
import signal
import sys
import time

import numpy as np

import mpistrat as ms

scenario = sys.argv[1]
STEPS = 4
SECONDS_LATE = 0.2


def reduce(strategy: ms.Strategy) -> None:
    strategy.reduce("SUM", np.float32(1), axis=None)


def train() -> None:
    """Rank 1 is late in the third step."""
    import torch

    strategy = ms.MultiWorkerMirroredStrategy(gradients="mean")
    communicator = strategy.extended.communicator
    with strategy.scope():
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = [torch.ones(6, 4) for _ in range(STEPS)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for i, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
            if i == 2 and communicator.rank == 1:
                time.sleep(SECONDS_LATE)
            strategy.reduce("mean", strategy.run(step, args=(batch,)), axis=None)
    ranges = {event.key: event.count for event in profiler.key_averages()}
    ours = {key: count for key, count in ranges.items() if key.startswith("mpistrat::")}
    if communicator.rank == 0:
        print(sorted(ours.items()))


def killed() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    for step in range(100):
        strategy.run(lambda: reduce_inside(), ())
        if step == 50 and strategy.extended.communicator.rank == 1:
            time.sleep(1.5)  # what came before was written for its age with the next event
            reduce(strategy)
            os.kill(os.getpid(), signal.SIGKILL)


def reduce_inside() -> None:
    context = ms.get_replica_context()
    assert context is not None
    context.all_reduce("sum", np.float32(1))


def fails() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    reduce(strategy)
    if strategy.extended.communicator.rank == 1:
        raise ValueError("an error of one rank")
    reduce(strategy)


def disk_is_full() -> None:
    """As far as rank 1 can tell: its files may not grow beyond what they are."""
    strategy = ms.MultiWorkerMirroredStrategy()
    reduce(strategy)
    if strategy.extended.communicator.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    for _ in range(5000):
        reduce(strategy)
    print("trained", flush=True)


def modules() -> None:
    """Which modules of the trace are loaded."""
    import torch

    strategy = ms.MultiWorkerMirroredStrategy(gradients="sum")
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    reduce(strategy)
    loaded = [name for name in sys.modules if name.startswith("mpistrat.") and "trace" in name]
    print(sorted(loaded), flush=True)


def large() -> None:
    """More than is merged at exit."""
    from mpistrat.trace import of_process

    of_process.MOST_BYTES_AT_EXIT = 1000
    reduce(ms.MultiWorkerMirroredStrategy())


def starts_a_program() -> None:
    """Which is no rank, and builds a strategy of its own."""
    import subprocess

    strategy = ms.MultiWorkerMirroredStrategy()
    code = "import mpistrat as ms; ms.MultiWorkerMirroredStrategy().run(print, ('alone',))"
    subprocess.run([sys.executable, "-c", code], check=True)
    reduce(strategy)


def some_ranks_alone() -> None:
    """A strategy of one rank, and one of all, in either order."""
    from mpi4py import MPI

    reduce(ms.MirroredStrategy(comm=MPI.COMM_SELF))
    reduce(ms.MultiWorkerMirroredStrategy())


globals()[scenario]()
