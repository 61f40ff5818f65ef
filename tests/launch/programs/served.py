"""Programs of jobs with parameter servers: one script for all ranks. Usage: served.py NAME FOLDER."""

import sys
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
    from mpistrat.parameter_server import server

    def fail(self, until=None):
        raise ZeroDivisionError("in the server")

    server.ParameterServer.serve = fail
    v1()
    time.sleep(60)


def chief_exits() -> None:
    v2()
    sys.exit(3)


def idles() -> None:
    from mpistrat.parameter_server import server

    serve = server.ParameterServer.serve

    def measured(self):
        def told() -> None:
            time.sleep(1)
            begin = time.process_time()
            time.sleep(2)
            say(f"idle {time.process_time() - begin:.3f}")

        import threading

        threading.Thread(target=told).start()
        serve(self)

    server.ParameterServer.serve = measured
    _, v = v1()
    v.assign(np.ones(3))
    time.sleep(5)


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
