"""A job in which one rank goes wrong: `faults.py FAULT SEED FOLDER`, on every rank.

All ranks make forty steps of four different collectives. The seed says which rank is the victim, and before which
collective of which step the fault happens to it. Right before, the victim tells FOLDER/event what is going to happen.
"""

import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

import mpistrat as ms

fault, seed, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
STEPS = 40
LONG = 600
SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()

strategy = ms.MultiWorkerMirroredStrategy(check="never" if seed == "unchecked" else "always")
rank = strategy.cluster_resolver.topology().rank
size = strategy.cluster_resolver.topology().size
jitter = random.Random(f"{seed} {rank}")


def line_of(name: str) -> int:
    """The number of the line that ends with this name in a comment."""
    return next(number for number, line in enumerate(SOURCE, 1) if line.endswith(f"  # {name}"))


def reduced_scalar(change: str) -> object:
    value = np.ones((2,) if change == "shape" else (), "f8" if change == "dtype" else "f4")
    return strategy.reduce("SUM", value, axis=None)  # reduced_scalar


def gathered(change: str) -> object:
    # Sizes along the axis may differ, but not the number of dimensions.
    shape = (2, 3, 1) if change == "shape" else (1 + rank, 3)
    value = np.ones(shape, "i4" if change == "dtype" else "f4")
    return strategy.gather(value, axis=0)  # gathered


def reduced_array(change: str) -> object:
    value = np.ones((5, 6) if change == "shape" else (6, 5), "i8" if change == "dtype" else "f8")
    return strategy.reduce("MEAN", value, axis=None)  # reduced_array


def replica(value: np.ndarray) -> object:
    context = ms.get_replica_context()
    return context.all_reduce(ms.ReduceOp.SUM, value)  # run


def run(change: str) -> object:
    value = np.ones(8 if change == "shape" else 7, "f4" if change == "dtype" else "f8")
    return strategy.run(replica, args=(value,))


COLLECTIVES: list[Callable[[str], object]] = [reduced_scalar, gathered, reduced_array, run]


def call(place: int, change: str = "") -> object:
    return COLLECTIVES[place % len(COLLECTIVES)](change)


def line_of_call(place: int) -> int:
    return line_of(COLLECTIVES[place % len(COLLECTIVES)].__name__)


def shared_files() -> list[str]:
    """The files in shared memory that this process maps, which must not outlive the job."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)))


def event(step: int, place: int, line: int) -> None:
    """The victim's `line`: where it is or was last, or where the fault itself is."""
    facts = {
        "victim": rank,
        "step": step,
        "line": line,
        "others_line": line_of_call(place),
        "shared_files": shared_files(),
        "time": time.time(),
    }
    (folder / "event").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def calls_otherwise(step: int, place: int) -> None:
    """The victim's calls from `place` on differ from the others', who find out in one of them."""
    if fault == "skip":
        event(step, place, line_of_call(place + 1))
    elif fault == "skip_last":
        event(step, place, line_of_call(place - 1))
    elif fault == "swap":
        event(step, place, line_of_call(place + 1))
        call(place + 1)
        call(place)
    else:
        event(step, place, line_of_call(place))
        call(place, change=fault)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raises() -> None:
    raise ValueError("wrong on this rank only")  # raises


def exits() -> None:
    sys.exit(0)  # exits


def os_exit() -> None:
    os._exit(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def gil() -> None:
    sum(itertools.repeat(0))  # gil


def slow() -> None:
    time.sleep(LONG)  # slow


STAYS_AWAY = (stop, raises, exits, os_exit, kill, gil, slow)
SILENT = (stop, os_exit, kill)  # only what they did before can be known


def goes_wrong() -> None:
    chosen = random.Random(f"{fault} {seed}")
    victim, fatal_step = chosen.randrange(size), chosen.randrange(1, STEPS - 1)
    fatal_place = chosen.randrange(len(COLLECTIVES))
    if fault == "skip_last":
        fatal_step, fatal_place = STEPS - 1, len(COLLECTIVES) - 1
    happens = next((function for function in STAYS_AWAY if function.__name__ == fault), None)
    for step in range(STEPS):
        after_swap = False
        for place in range(len(COLLECTIVES)):
            if after_swap:
                continue
            if (rank, step, place) == (victim, fatal_step, fatal_place):
                if happens is None:
                    calls_otherwise(step, place)
                    after_swap = fault == "swap"
                    continue
                silent = happens in SILENT
                event(step, place, line_of_call(place - 1) if silent else line_of(fault))
                happens()
            time.sleep(jitter.random() / 1000)
            call(place)


def steps(number: int) -> None:
    for place in range(number * len(COLLECTIVES)):
        call(place)


def catches_a_stall() -> None:
    """The last rank comes late; the others catch the error, and all end as if nothing had been."""
    steps(5)
    if rank == size - 1:
        event(5, 0, line_of("late"))
        time.sleep(6 if seed == "0" else LONG)  # late
    else:
        try:
            steps(1)
        except ms.errors.StallError as error:
            print(f"rank {rank} caught {error}\n", end="", flush=True)


def two_orders() -> None:
    """The last rank uses two strategies, each over all ranks, in another order than the others."""
    from mpi4py import MPI

    second = ms.MultiWorkerMirroredStrategy(comm=cast("MPI.Intracomm", MPI.COMM_WORLD.Dup()))
    steps(5)
    if rank == size - 1:
        event(5, 0, line_of("second"))
        second.reduce("SUM", np.float32(1), axis=None)  # second
    call(0)
    second.reduce("SUM", np.float32(1), axis=None)


def in_own_mpi_call() -> None:
    """The last rank waits for a message that nobody sends, while the others wait for it."""
    from mpi4py import MPI

    steps(5)
    if rank == size - 1:
        event(5, 0, line_of("receives"))
        MPI.COMM_WORLD.recv(source=0)  # receives
    steps(1)


def all_exit_at_once() -> None:
    steps(STEPS)
    time.sleep(0.5 + 0.1 * rank)  # a launcher kills the others when one has ended
    os._exit(0)


others = {
    function.__name__: function
    for function in (catches_a_stall, two_orders, in_own_mpi_call, all_exit_at_once)
}
others.get(fault, goes_wrong)()
