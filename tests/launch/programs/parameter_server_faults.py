"""Jobs with parameter servers of which ranks are killed: `parameter_server_faults.py WHAT SEED [KILLS]`, on every rank.

WHAT is "closures" (a chief, workers, servers) or "steps" (workers that train by themselves, and servers), whose workers
are killed one after the other; "training closures", each of which steps an optimizer; "replicated closures" or
"replicated steps", of which one server is killed, too; "looks" or "training" with replicas, of which that one is killed
if KILLS is 1; or who is killed once: "chief", "server", "server of steps", "both copies", "all workers". When and where
the seed says.
"""

import faulthandler
import hashlib
import itertools
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.rpc.channel import Channel
from mpistrat.parameter_server.rpc.endpoint import RpcEndpoint
from mpistrat.parameter_server.rpc.pipes import PipeOutbox
from mpistrat.parameter_server.rpc.segments import Buffers

SECONDS_FOR_STACKS = 60.0  # less than the test waits
SECONDS_BETWEEN_KILLS = 0.15
SECONDS_TO_DIE = 0.5
MOST_WAITING = 100
LARGE = 50_000  # numbers: their memory is mapped by the servers
SMALL = 700  # go through a pipe, in several pieces
PLACES = (
    (Channel, "send"),
    (Buffers, "take"),  # a large operand is about to be written
    (RpcEndpoint, "wait_for"),  # an update is sent
    (Buffers, "give_back"),  # and made
    (RpcEndpoint, "notify"),  # outcomes of closures go to the chief
    (Channel, "receive"),
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
        if len(message) > select.PIPE_BUF:
            os.write = write_and_die  # type: ignore[assignment]
        return original(self, message)

    def write_and_die(descriptor: int, piece: bytes) -> None:
        write(descriptor, piece)
        die()

    original, write = PipeOutbox.put, os.write
    PipeOutbox.put = put  # type: ignore[method-assign]


def prepare_to_die(*_: Any) -> None:
    threading.Timer(SECONDS_TO_DIE, die).start()  # some ranks never come to some places
    place = own_plan.randrange(len(PLACES) + 1)
    if place == len(PLACES):
        die_within_a_message()
    else:
        die_at_call(*PLACES[place], own_plan.randint(1, 3))


def kill(ranks: list[int]) -> None:
    """One after the other: at any moment, or somewhere in the code."""
    for rank in ranks:
        time.sleep(plan.random() * 2 * SECONDS_BETWEEN_KILLS)
        os.kill(pids[rank], plan.choice((signal.SIGKILL, signal.SIGUSR1)))


def expect_unavailable(does: Callable[[], Any]) -> None:
    try:
        while True:
            does()
    except UnavailableError as error:
        print(f"UnavailableError: {error}", flush=True)


def closures(replication: int = 1) -> None:
    strategy = ms.ParameterServerStrategy(
        num_ps=max(2, 2 * replication - 1), replication=replication
    )
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
    victims = plan.sample(list(cluster.workers), kills)
    if replication > 1:
        victims.insert(plan.randint(0, kills), plan.choice(strategy.extended.job.servers))
    killer = threading.Thread(target=kill, args=(victims,))
    killer.start()
    results = []
    while killer.is_alive() or cluster.rpc.channel.lost < set(victims):
        number = len(results)
        seconds = plan.random() * 4e-3
        results.append(coordinator.schedule(work, args=(number, seconds, plan.random() < 0.5)))
        if len(results) > MOST_WAITING:
            results[-MOST_WAITING].get()
    coordinator.join()
    assert coordinator.done()
    assert [int(result.mean()) for result in coordinator.fetch(results)] == list(
        range(len(results))
    )
    counts = {int(counter.numpy()) / 2, *np.unique(large.numpy()), *np.unique(small.numpy())}
    assert counts == {len(results)}, (counts, len(results))
    print(f"{len(results)} closures, {kills} workers killed: all is exact", flush=True)


def training_closures() -> None:
    """Each reads an element of its worker's dataset, and moves all weights by one."""
    import torch

    strategy = ms.ParameterServerStrategy(num_ps=2)
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = ms.Variable(0, name="counter")
        model = torch.nn.Linear(SMALL, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    elements = iter(coordinator.create_per_worker_dataset(itertools.count))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, SMALL)).sum().backward()
        optimizer.step()

    def work(elements: Iterator[int]) -> int:
        counter.assign_add(1)
        strategy.run(step)
        return next(elements)

    cluster = strategy.extended.cluster
    assert cluster is not None
    victims = plan.sample(list(cluster.workers), kills)
    results = [coordinator.schedule(work, args=(elements,))]
    coordinator.join()  # torch is there: that takes longer than all the kills
    killer = threading.Thread(target=kill, args=(victims,))
    killer.start()
    while killer.is_alive() or cluster.rpc.channel.lost < set(victims):
        results.append(coordinator.schedule(work, args=(elements,)))
        if len(results) > MOST_WAITING:
            results[-MOST_WAITING].get()
    coordinator.join()
    assert all(element >= 0 for element in coordinator.fetch(results))
    counts = {int(counter.numpy()), *np.unique(-model.state_dict()["weight"].numpy())}
    assert counts == {len(results)}, (counts, len(results))
    print(f"{len(results)} closures, {kills} workers killed: all is exact", flush=True)


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


def steps(replication: int = 1) -> None:
    """Each worker counts its own steps, here and on the servers; the others' deaths change nothing."""
    strategy = ms.compat.v1.ParameterServerStrategy(
        num_ps=max(2, 2 * replication - 1),
        replication=replication,
        max_staleness=plan.choice((None, 0, 2)),
    )
    job = strategy.extended.job
    workers = list(job.workers)
    mine = job.roles.task_id
    with strategy.scope():
        done = ms.Variable(np.zeros(len(workers)), name="done")
        large = ms.Variable(np.zeros((len(workers), LARGE)), name="large")
    own_row = np.eye(len(workers))[mine]

    def step() -> None:
        time.sleep(own_plan.random() * 4e-3)
        done.assign_add(own_row)
        large.scatter_add(ms.IndexedSlices(np.ones((1, LARGE)), np.array([mine])))

    survivor = plan.randrange(len(workers))
    others = [rank for index, rank in enumerate(workers) if index != survivor]
    victims = plan.sample(others, kills)
    if replication > 1:
        victims.insert(plan.randint(0, kills), plan.choice(job.servers))
    if mine == survivor:
        threading.Thread(target=kill, args=(victims,), daemon=True).start()
    taken = 0
    record = os.open(f"steps-{mine}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    while workers[mine] in victims or not set(victims) <= job.rpc.channel.lost or taken < 20:
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


def training() -> None:
    """Synchronous, with Adam on the servers: the same bits, whether one of them is killed or not."""
    import torch

    strategy = ms.compat.v1.ParameterServerStrategy(
        num_ps=2, replication=2, max_staleness=0, gradients="mean"
    )
    job = strategy.extended.job
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1)
        )
        optimizer = torch.optim.Adam(model.parameters())
    data = torch.Generator().manual_seed(me)
    checkpoint = ms.checkpoint.Checkpoint(model=model, optimizer=optimizer)
    manager = ms.checkpoint.CheckpointManager(checkpoint, "saved")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=data)).square().mean().backward()
        optimizer.step()

    for number in range(20):
        if kills and number == 10 and job.roles.task_id == 0:
            os.kill(pids[plan.choice(job.servers)], signal.SIGKILL)
        strategy.run(step)
        if number in (9, 19):
            manager.save()
    manager.wait()
    with torch.no_grad():
        bits = torch.cat([p.flatten() for p in model.state_dict().values()]).numpy().tobytes()
    print(f"weights {hashlib.sha256(bits).hexdigest()}", flush=True)


def reads_snapshots() -> None:
    """What is pushed to all servers at once is in what one rank reads of them at one time, or is not."""
    strategy = ms.compat.v1.ParameterServerStrategy(
        num_ps=3,
        replication=2,
        variable_partitioner=ms.experimental.partitioners.FixedShardsPartitioner(3),
    )
    job = strategy.extended.job
    with strategy.scope():
        parts = ms.Variable(np.zeros(3 * SMALL), name="parts")
        still = ms.Variable(np.zeros(len(job.workers)), name="still")
    if job.roles.task_id:
        while not still.numpy()[0]:
            parts.assign_add(np.ones(3 * SMALL))
        return
    if kills:
        victim = plan.choice(job.servers)
        threading.Thread(target=kill, args=([victim],), daemon=True).start()
    taken, after = 0, 0
    while after < 30 and taken < 10_000:
        with strategy.extended.checkpoints.unchanging():
            seen = parts.numpy()
            time.sleep(own_plan.random() * 2e-3)
            again = parts.numpy()
        assert np.ptp(seen) == 0, (taken, seen)
        assert np.array_equal(seen, again), (taken, seen, again)
        taken += 1
        after += not kills or bool(job.rpc.channel.lost)
    print(f"{taken} looks of {seen[0]:g} updates, none torn", flush=True)
    still.assign(np.ones(len(job.workers)))


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


def both_copies_die() -> None:
    strategy = ms.compat.v1.ParameterServerStrategy(num_ps=3, replication=2)
    job = strategy.extended.job
    names = ("first", "second", "third")
    with strategy.scope():
        first, second, third = (ms.Variable(np.zeros(10), name=name) for name in names)
    for variable in (first, second, third):
        variable.assign_add(np.ones(10))
    if job.roles.task_id == 0:
        while not all(
            variable.numpy()[0] >= len(job.workers) for variable in (first, second, third)
        ):
            time.sleep(0.01)
        os.kill(pids[job.servers[0]], signal.SIGKILL)
        assert first.numpy()[0] >= len(job.workers)  # of the replica, by who goes on
        os.kill(pids[job.servers[1]], signal.SIGKILL)
        try:
            with strategy.extended.checkpoints.unchanging():
                print("what is lost is saved", flush=True)
        except UnavailableError:
            pass  # and does not try for ever
    expect_unavailable(
        first.read_value if job.roles.task_id == 0 else lambda: first.assign_add(np.ones(10))
    )
    while second.numpy()[0] < len(job.workers):
        time.sleep(0.01)
    print(f"the worker goes on with {second.numpy()[0]:g}", flush=True)


def main() -> None:
    faulthandler.dump_traceback_later(SECONDS_FOR_STACKS, exit=True)
    signal.signal(signal.SIGUSR1, prepare_to_die)
    if what in ("closures", "replicated closures"):
        closures(2 if what.startswith("replicated") else 1)
    elif what in ("steps", "replicated steps"):
        steps(2 if what.startswith("replicated") else 1)
    elif what == "training closures":
        training_closures()
    elif what in ("training", "looks"):
        (training if what == "training" else reads_snapshots)()
    elif what == "both copies":
        both_copies_die()
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
