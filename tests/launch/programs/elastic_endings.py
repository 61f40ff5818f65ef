"""An elastic job that ends in another way: `elastic_endings.py HOW`, on every rank; rank 1, or who is named, does what
HOW says.
"""

import atexit
import os
import signal
import socket
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.fault_tolerance.survivors import Survivors

HOW = sys.argv[1]
EXITS = ("exit handlers", "an earlier strategy", "SystemExit in train")
if HOW == "does not come":
    os.environ["MPISTRAT_START_SECONDS"] = "2"
me = MPI.COMM_WORLD.rank
order: list[str] = []


def train(elastic: ms.fault_tolerance.Elastic) -> None:
    strategy = elastic.strategy()
    with strategy.scope():
        total = ms.Variable(np.zeros(()), name="total")
    elastic.restore(ms.checkpoint.Checkpoint(total=total))
    while elastic.step < 10:
        if HOW == "node-2" and elastic.step == 5 and socket.gethostname() == "node2":
            os.kill(os.getppid(), signal.SIGKILL)  # its daemon
            die()
        if HOW == "rank-3" and me == 3 and elastic.step == 5:
            die()
        if me == 1 and elastic.step == 5:
            if HOW == "raises":
                raise KeyError("of its own")
            if HOW == "leaves":
                return
            if HOW not in ("nothing", "after the last step", "rank-3", "node-2"):
                die()
        total.assign_add(strategy.reduce("mean", 1.0, axis=None))
        elastic.commit()
    assert total.numpy() == elastic.step == 10
    if HOW == "SystemExit in train":
        end_in_order()
        raise SystemExit(7)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DeadlyStep(int):
    """Kills who sends it."""

    def __reduce__(self) -> str:
        time.sleep(0.3)  # the others wait for it
        die()
        return "never"


def die_while_they_agree() -> None:
    go_on = Survivors.go_on

    def deadly(self: Survivors, last: int | None) -> tuple[list[int], int | None]:
        return go_on(self, DeadlyStep(last or 0))

    Survivors.go_on = deadly  # type: ignore[method-assign]


def die_when_all_are_done() -> None:
    end = Survivors.end

    def after_a_while(self: Survivors) -> None:
        if me == 1:
            die()
        time.sleep(0.5)
        end(self)

    Survivors.end = after_a_while  # type: ignore[method-assign]


def end_in_order() -> None:
    atexit.register(order.append, "then the second handler")
    threading.Thread(target=work).start()


def tell_order() -> None:
    if me == 0:
        time.sleep(0.3)  # the other's end must not be this one's
    order.append("then the first")
    sys.stdout.write(f"rank {me}: {', '.join(order)}\n")


def work() -> None:
    time.sleep(0.2)
    order.append("the thread")


def main() -> None:
    if HOW in EXITS:
        atexit.register(tell_order)
    if HOW == "an earlier strategy":
        assert ms.MultiWorkerMirroredStrategy().reduce("sum", 1.0, axis=None) == 3.0
    if HOW == "does not come" and me == 1:
        time.sleep(4)
        os._exit(0)
    if HOW == "after the last step":
        die_when_all_are_done()
    if HOW == "another while they agree" and me == 2:
        die_while_they_agree()
    ms.fault_tolerance.run_elastic(train, min_replicas=2)
    if HOW in ("nothing", "after the last step", "rank-3", "node-2"):
        sys.stdout.write("10\n")
    if HOW in EXITS:
        end_in_order()
        if HOW == "exit handlers":
            sys.exit(7)
        exit(7)


if __name__ == "__main__":
    main()
