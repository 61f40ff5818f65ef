"""Jobs with parameter servers of which ranks are killed: `parameter_server_faults.py WHAT SEED [KILLS]`, on every rank.

WHAT is "closures" (a chief, workers, servers) or "steps" (workers that train by themselves, and servers), whose workers
are killed one after the other; or who is killed once: "chief", "server", "server of steps", "all workers".
When and where the seed says.
"""

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.coordinator.worker import Worker
from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.mail import Mail
from mpistrat.parameter_server.pipes import _HEADER as HEADER
from mpistrat.parameter_server.pipes import _PIECE as PIECE
from mpistrat.parameter_server.pipes import PipeOutbox
from mpistrat.parameter_server.post import Post
from mpistrat.parameter_server.segments import Buffers

SECONDS_FOR_STACKS = 60.0  # less than the test waits
SECONDS_BETWEEN_KILLS = 0.15
SECONDS_TO_DIE = 0.5
MOST_WAITING = 100
LARGE = 50_000  # numbers: their memory is mapped by the servers
SMALL = 700  # go through a pipe, in several pieces
PLACES = (
    (Mail, "send"),
    (Buffers, "take"),  # a large operand is about to be written
    (Post, "wait_for"),  # an update is sent
    (Buffers, "give_back"),  # and made
    (Worker, "_send_outcomes"),
    (Post, "_handle"),
)

what, seed = sys.argv[1], sys.argv[2]
kills = int(sys.argv[3]) if len(sys.argv) > 3 else 1
me, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pids = MPI.COMM_WORLD.allgather(os.getpid())
plan = random.Random(f"parameter servers {seed}")
own_plan = random.Random(f"parameter servers {seed} {me}")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner: Any, name: str, number: int) -> None:
    """At the `number`-th call of a function from now on."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            die()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def die_within_a_message() -> None:
    """When some pieces of it are in the receiver's pipe."""

    def put(self: PipeOutbox, message: bytes) -> bool:
        if len(message) > PIECE:
            os.write(self.descriptor, HEADER.pack(me, PIECE, False) + message[:PIECE])
            die()
        return original(self, message)

    original = PipeOutbox.put
    PipeOutbox.put = put  # type: ignore[method-assign]


def prepare_to_die(*_: Any) -> None:
    threading.Timer(SECONDS_TO_DIE, die).start()  # some ranks never come to some places
    place = own_plan.randrange(len(PLACES) + 1)
    if place == len(PLACES):
        die_within_a_message()
    else:
        die_at_call(*PLACES[place], own_plan.randint(1, 3))


def kill_workers(workers: list[int]) -> None:
    """One after the other: at any moment, or somewhere in the code."""
    for rank in workers:
        time.sleep(plan.random() * 2 * SECONDS_BETWEEN_KILLS)
        os.kill(pids[rank], plan.choice((signal.SIGKILL, signal.SIGUSR1)))


def expect_unavailable(does: Callable[[], Any]) -> None:
    try:
        while True:
            does()
    except UnavailableError as error:
        print(f"UnavailableError: {error}", flush=True)


def closures(victims: Callable[[list[int]], list[int]]) -> None:
    strategy = ms.ParameterServerStrategy(num_ps=2)
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = ms.Variable(0, name="counter")
        large = ms.Variable(np.zeros(LARGE), name="large")
        small = ms.Variable(np.zeros(SMALL), name="small")

    def work(number: int, seconds: float, sparse: bool) -> np.ndarray:
        time.sleep(seconds)
        counter.assign_add(1)
        small.assign_add(np.ones(SMALL))
        if sparse:
            rows = np.array([0, LARGE - 1])
            large.scatter_add(ms.IndexedSlices(np.ones(2), rows))
            large.scatter_add(ms.IndexedSlices(np.full(2, -1.0), rows))
        large.assign_add(np.ones(LARGE))
        counter.assign_add(1)
        return np.full(SMALL, number)

    cluster = strategy.extended.cluster
    assert cluster is not None
    workers = victims(list(cluster.workers))
    killer = threading.Thread(target=kill_workers, args=(workers,))
    killer.start()
    results = []
    while killer.is_alive() or cluster.post.mail.lost < set(workers):
        number = len(results)
        seconds = plan.random() * 4e-3
        results.append(coordinator.schedule(work, args=(number, seconds, plan.random() < 0.5)))
        while len(coordinator._queue) > MOST_WAITING:
            time.sleep(1e-3)
    coordinator.join()
    assert coordinator.done()
    assert [int(one.mean()) for one in coordinator.fetch(results)] == list(range(len(results)))
    counts = {int(counter.numpy()) / 2, *np.unique(large.numpy()), *np.unique(small.numpy())}
    assert counts == {len(results)}, (counts, len(results))
    print(f"{len(results)} closures, {len(workers)} workers killed: all is exact", flush=True)


def chief_dies() -> None:
    strategy = ms.ParameterServerStrategy(num_ps=2)
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = ms.Variable(0, name="counter")
    for _ in range(100):
        coordinator.schedule(lambda: (time.sleep(0.01), counter.assign_add(1)))
    time.sleep(plan.random() * 0.1)
    die()


def lost_for_good(ranks: Callable[[Any], list[int]]) -> None:
    """Ranks are killed without which nothing goes on: everything raises UnavailableError."""
    strategy = ms.ParameterServerStrategy(num_ps=2)
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        first = ms.Variable(0, name="first")
        second = ms.Variable(np.zeros(10), name="second")
    assert "task:0" in first.device
    coordinator.fetch(coordinator.schedule(lambda: first.assign_add(1) + second.numpy().sum()))
    results = [
        coordinator.schedule(lambda: (time.sleep(0.01), first.assign_add(1))) for _ in range(100)
    ]
    for rank in ranks(strategy.extended.cluster):
        os.kill(pids[rank], signal.SIGKILL)
    expect_unavailable(coordinator.join)
    expect_unavailable(lambda: coordinator.fetch(results))
    expect_unavailable(lambda: coordinator.schedule(lambda: None))
    print("the chief goes on", flush=True)


def steps() -> None:
    """Each worker counts its own steps, here and on the servers; the others' deaths change nothing."""
    strategy = ms.compat.v1.ParameterServerStrategy(
        num_ps=2, max_staleness=plan.choice((None, 0, 2))
    )
    job = strategy.extended.job
    workers = list(job.workers)
    mine = job.roles.task_id
    with strategy.scope():
        done = ms.Variable(np.zeros(len(workers)), name="done")
        large = ms.Variable(np.zeros((len(workers), LARGE)), name="large")
    one = np.eye(len(workers))[mine]

    def step() -> None:
        time.sleep(own_plan.random() * 4e-3)
        done.assign_add(one)
        large.scatter_add(ms.IndexedSlices(np.ones((1, LARGE)), np.array([mine])))

    survivor = plan.randrange(len(workers))
    others = [rank for index, rank in enumerate(workers) if index != survivor]
    victims = plan.sample(others, kills)
    if mine == survivor:
        threading.Thread(target=kill_workers, args=(victims,), daemon=True).start()
    taken = 0
    record = os.open(f"steps-{mine}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    while workers[mine] in victims or not set(victims) <= job.post.mail.lost or taken < 20:
        strategy.run(step)
        taken += 1
        os.write(record, b".")
    values = done.numpy(), large.numpy()
    assert values[0][mine] == taken, (values[0], taken)
    assert (values[1][mine] == taken).all()
    for index, rank in enumerate(workers):
        if rank in victims:
            path = Path(f"steps-{index}")
            known = path.stat().st_size if path.exists() else 0
            assert known <= values[0][index] <= known + 1, (known, values[0])
            assert np.ptp(values[1][index]) == 0
            assert values[0][index] - 1 <= values[1][index, 0] <= values[0][index]
    print(f"worker {mine} is done after {len(victims)} deaths", flush=True)


def server_of_steps_dies() -> None:
    strategy = ms.compat.v1.ParameterServerStrategy(num_ps=2)
    job = strategy.extended.job
    with strategy.scope():
        first, second = (ms.Variable(np.zeros(10), name=name) for name in ("first", "second"))
    first.assign_add(np.ones(10))
    second.assign_add(np.ones(10))
    if job.roles.task_id == 0:
        time.sleep(0.1)
        os.kill(pids[job.servers[1]], signal.SIGKILL)
    reads = job.roles.task_id == 0
    expect_unavailable(second.read_value if reads else lambda: second.assign_add(np.ones(10)))
    first.assign_add(np.ones(10))
    print("the worker goes on", flush=True)


def main() -> None:
    faulthandler.dump_traceback_later(SECONDS_FOR_STACKS, exit=True)
    signal.signal(signal.SIGUSR1, prepare_to_die)
    if what == "closures":
        closures(lambda workers: plan.sample(workers, kills))
    elif what == "steps":
        steps()
    elif what == "chief":
        chief_dies()
    elif what == "server":
        lost_for_good(lambda cluster: [size - 2])
    elif what == "all workers":
        lost_for_good(lambda cluster: list(cluster.workers))
    else:
        server_of_steps_dies()


if __name__ == "__main__":
    main()
