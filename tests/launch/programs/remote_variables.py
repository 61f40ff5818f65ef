"""Programs of jobs with parameter servers: one script for all ranks. Usage: remote_variables.py NAME FOLDER."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.compat.v1 import ParameterServerStrategy

RANK = MPI.COMM_WORLD.rank
FOLDER = Path(sys.argv[2])


def v1(**keywords):
    strategy = ParameterServerStrategy(num_ps=1, **keywords)
    with strategy.scope():
        return strategy, ms.Variable(np.zeros(3), name="v")


def v2():
    strategy = ms.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        return strategy, ms.Variable(np.zeros(3), name="v")


def trains() -> None:
    strategy, v = v1()
    strategy.run(lambda: v.assign_add(np.ones(3)))
    say("after")


def add(v) -> None:
    v.assign_add(np.ones(3))


def coordinates() -> None:
    strategy, v = v2()
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    for _ in range(20):
        coordinator.schedule(add, args=(v,))
    coordinator.join()
    say("after")


def does_not_join() -> None:
    strategy, _ = v2()
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    for _ in range(50):
        coordinator.schedule(time.sleep, args=(0.2,))
    say("after")


def is_interrupted() -> None:
    """By the launcher, which sends it to all ranks; more than once, as that and a terminal may do."""
    ranks = MPI.COMM_WORLD.allgather(os.getpid())
    strategy, v = v2()
    coordinator = ms.coordinator.ClusterCoordinator(strategy)

    def slow() -> None:
        time.sleep(1)
        v.assign_add(np.ones(3))

    for _ in range(6):
        coordinator.schedule(slow)
    time.sleep(0.5)
    try:
        for rank in (*ranks[1:], *reversed(ranks)):
            os.kill(rank, signal.SIGINT)
        coordinator.join()
    except KeyboardInterrupt:
        say("interrupted")
    coordinator.join()
    say(f"value {v.numpy()[0]}")


def forgets() -> None:
    import gc

    def main() -> None:
        strategy, v = v1()
        strategy.run(lambda: v.assign_add(np.ones(3)))

    main()
    gc.collect()
    say("after")


def worker_raises() -> None:
    v1()
    if RANK == 1:
        raise KeyError("on this worker only")
    time.sleep(60)


def server_fails() -> None:
    from mpistrat.parameter_server.server import server

    def fail(self, until=None):
        raise ZeroDivisionError("in the server")

    server.ParameterServer.serve = fail
    v1()
    time.sleep(60)


def chief_exits() -> None:
    v2()
    sys.exit(3)


def idle_beside_a_function() -> None:
    """v2: a chief that joins, a worker that sleeps in a function, one that has none, and a server."""
    measure_idle_time()
    strategy, _ = v2()
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    coordinator.schedule(time.sleep, args=(5,))
    coordinator.join()


def idle_beside_a_long_step() -> None:
    """v1: a worker that sleeps in a step, others that it holds back, and a server."""
    measure_idle_time()
    strategy, v = v1(max_staleness=1)
    strategy.run(add, args=(v,))
    if RANK == 1:
        strategy.run(time.sleep, args=(5,))
        strategy.shutdown()
    else:
        for _ in range(3):
            strategy.run(add, args=(v,))
        assert strategy.steps["worker 1 (rank 1)"] == 2


def measure_idle_time() -> None:
    """Of this process, when it has begun."""

    def measure() -> None:
        time.sleep(2)
        begin = time.process_time()
        time.sleep(2)
        say(f"idle {time.process_time() - begin:.3f}")

    threading.Thread(target=measure).start()


def works() -> None:
    """v1, for ever."""
    (FOLDER / f"pid{RANK}").write_text(str(os.getpid()))
    strategy, v = v1(max_staleness=0)
    while True:
        strategy.run(lambda: v.assign_add(np.ones(3)))
        (FOLDER / f"ready{RANK}").touch()


def schedules() -> None:
    """v2: both workers are in functions that do not end, and the chief waits for them."""
    (FOLDER / f"pid{RANK}").write_text(str(os.getpid()))
    strategy, v = v2()
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    for _ in range(2):
        coordinator.schedule(wait, args=(v,))
    (FOLDER / f"ready{RANK}").touch()
    coordinator.join()


def wait(v) -> None:
    v.assign_add(np.ones(3))
    (FOLDER / f"ready{MPI.COMM_WORLD.rank}").touch()
    time.sleep(100)


def tell_task(cluster: dict[str, list[str]], task: str, index: int) -> None:
    """As a launcher that knows the tasks would."""
    config = {"cluster": cluster, "task": {"type": task, "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(config)


TASKS = (("ps", 0), ("worker", 1), ("chief", 0), ("worker", 0))  # by rank
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def told_to_coordinate() -> None:
    tell_task(CLUSTER, *TASKS[RANK])
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        v = ms.Variable(np.zeros(3))
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    for _ in range(20):
        coordinator.schedule(add, args=(v,))
    coordinator.join()
    say_task(strategy, v)


def told_to_train() -> None:
    tell_task(CLUSTER, *TASKS[RANK])
    trainers = MPI.COMM_WORLD.Split(TASKS[RANK][0] == "ps")
    strategy = ParameterServerStrategy()
    with strategy.scope():
        v = ms.Variable(np.zeros(3))
    strategy.run(add, args=(v,))
    trainers.Barrier()
    say_task(strategy, v)


def say_task(strategy, v) -> None:
    resolver = strategy.cluster_resolver
    say(f"{resolver.task_type} {resolver.task_id} sees {v.numpy()[0]:g}")


def two_chiefs() -> None:
    cluster = {**CLUSTER, "chief": ["a:1", "e:1"], "worker": ["b:1"]}
    tell_task(cluster, *(("ps", 0), ("worker", 0), ("chief", 0), ("chief", 1))[RANK])
    fails_everywhere(ms.ParameterServerStrategy)


def two_ranks_are_chief() -> None:
    tell_task(CLUSTER, *(("ps", 0), ("worker", 0), ("chief", 0), ("chief", 0))[RANK])
    fails_everywhere(ms.ParameterServerStrategy)


def fails_everywhere(make) -> None:
    try:
        make()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        MPI.COMM_WORLD.Barrier()  # one that is not caught ends the others
        raise


def no_servers() -> None:
    ms.ParameterServerStrategy()


def too_few() -> None:
    ms.ParameterServerStrategy(num_ps=7)


def wrong_number() -> None:
    ParameterServerStrategy(num_ps=0)


def alone() -> None:
    for num_ps in (None, 2):  # the same program as under mpirun
        strategy = ParameterServerStrategy(num_ps=num_ps)
        with strategy.scope():
            v = ms.Variable(1.0)
        strategy.run(lambda v=v: v.assign_add(1.0))
        say(f"value {float(v.numpy())}")


def say(text: str) -> None:
    sys.stdout.write(f"rank {RANK}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
