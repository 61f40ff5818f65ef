"""What the observer must leave alone, or see in time: `observed.py SCENARIO FOLDER`, on every rank."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import numpy as np
from mpi4py import MPI

scenario, folder = sys.argv[1], Path(sys.argv[2])
mkdir = os.mkdir


def without_job_folders(path: str, mode: int = 0o777) -> None:
    if "mpistrat-" in str(path):
        raise OSError("no room")
    mkdir(path, mode)


if scenario == "no_record":
    os.mkdir = without_job_folders  # type: ignore[assignment]
import mpistrat as ms  # noqa: E402 - it makes the record
from mpistrat.liveness.observer import observation  # noqa: E402

LIMIT = float(os.environ["MPISTRAT_STALL_SECONDS"])
world = MPI.COMM_WORLD
last = world.rank == world.size - 1


def reduce(strategy: ms.Strategy) -> None:
    strategy.reduce("SUM", np.float32(1), axis=None)


def strategy_of(comm: object = None) -> ms.Strategy:
    return ms.MultiWorkerMirroredStrategy(comm=cast("MPI.Intracomm | None", comm))


def own_mapping() -> None:
    """A file in shared memory that the program maps is not MPI's."""
    mapped = np.memmap(f"/dev/shm/{folder.name}-{world.rank}", np.uint8, "w+", shape=(4096,))
    reduce(strategy_of())
    assert len(mapped) == 4096


def waits_for_all_children() -> None:
    """The observer is no child of the program's."""
    reduce(strategy_of())
    if os.fork() == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    print("all reaped", flush=True)


def halves_first() -> None:
    """Strategies over parts of the node's ranks, then one over all: the missing rank is named all the same."""
    reduce(strategy_of(world.Split(world.rank // 2, world.rank)))
    everyone = strategy_of()
    if last:
        time.sleep(600)  # halves_first
    reduce(everyone)


def no_working_directory() -> None:
    place = folder / f"gone-{world.rank}"
    place.mkdir()
    os.chdir(place)
    place.rmdir()
    strategy = strategy_of()
    if last:
        time.sleep(600)  # no_working_directory
    reduce(strategy)


def no_record() -> None:
    """There is no room for one; the limit holds nevertheless."""
    strategy = strategy_of()
    if last:
        time.sleep(600)
    reduce(strategy)


def late_and_saving() -> None:
    """The missing rank comes while those that caught the error save: it gets the error, too, and all can save."""
    strategy = strategy_of()
    try:
        if last:
            time.sleep(2.5 * LIMIT)
        reduce(strategy)
    except ms.errors.StallError:
        time.sleep(LIMIT if last else 2 * LIMIT)
        print(f"rank {world.rank} saved\n", end="", flush=True)


def of_one_pair() -> None:
    """A stall among ranks 0 and 1 is none of the others'."""
    strategy = strategy_of(world.Split(world.rank // 2, world.rank))
    try:
        for _ in range(int(30 * LIMIT)):
            if world.rank == 1:
                time.sleep(600)
            time.sleep(0.1)
            reduce(strategy)
    except ms.errors.StallError:
        print(f"rank {world.rank} caught\n", end="", flush=True)
        time.sleep(3 * LIMIT)
    else:
        print(f"rank {world.rank} finished\n", end="", flush=True)


def suspended() -> None:
    """All ranks are stopped for longer than the limit, as by `scontrol suspend`."""
    strategy = strategy_of()
    pids = " ".join(map(str, world.allgather(os.getpid())))
    if last:
        program = f"sleep 1; kill -STOP {pids}; sleep {2 * LIMIT}; kill -CONT {pids}"
        subprocess.Popen(["sh", "-c", program], start_new_session=True)
    for _ in range(15):
        time.sleep(0.2 * last)
        reduce(strategy)
    print("finished", flush=True)


def ends_before_the_other_receives() -> None:
    """Nobody knows that this is wrong; what is known is said."""
    reduce(strategy_of())
    if world.rank == 0:
        signal.alarm(int(2 * LIMIT + 2))  # the test's own end
        world.recv(source=1)  # ends_before_the_other_receives


def without_observer() -> None:
    """The observer is stopped or killed, and the last rank does not come."""
    strategy = strategy_of()
    reduce(strategy)
    observed = observation.current
    assert observed is not None
    pid = observed.record.observer
    if world.rank == 0:
        held = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        print(
            "held:",
            sorted(name for name in held if name.startswith(("pipe:", "/dev/pts", "socket:"))),
            flush=True,
        )
        os.kill(pid, getattr(signal, sys.argv[3]))
    world.Barrier()
    if last and sys.argv[4] == "stalls":
        time.sleep(600)  # without_observer
    reduce(strategy)
    print("finished", flush=True)


def closes_all_files() -> None:
    """As a library does that makes a daemon of its process."""
    strategy = strategy_of()
    reduce(strategy)
    if last:
        os.closerange(3, 1024)
    for _ in range(50):
        time.sleep(0.1)
        reduce(strategy)


scenarios = {
    scenario.__name__: scenario
    for scenario in (
        own_mapping,
        waits_for_all_children,
        halves_first,
        no_working_directory,
        no_record,
        late_and_saving,
        of_one_pair,
        suspended,
        ends_before_the_other_receives,
        without_observer,
        closes_all_files,
    )
}
scenarios[scenario]()
