"""Programs that end in many ways: `endings.py NAME FOLDER` runs the function NAME on every rank.

The rank that makes it happen writes the time to FOLDER/event.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import mpi4py
import numpy as np

name, folder = sys.argv[1], Path(sys.argv[2])
if name == "serialized":
    mpi4py.rc.thread_level = "serialized"

from mpi4py import MPI  # noqa: E402

from mpistrat.communicators import reducing  # noqa: E402
from mpistrat.communicators.construction import communicator_for  # noqa: E402

world = MPI.COMM_WORLD
rank, last = world.rank, world.size - 1
LONG = 100


def event() -> None:
    (folder / "event").write_text(str(time.time()))


def ready() -> None:
    (folder / f"ready{rank}").write_text(str(os.getpid()))


def start(comm: MPI.Intracomm = world):
    ours = communicator_for(comm)
    for _ in range(5):
        ours.all_reduce(np.ones(3))
    return ours


def raises() -> None:
    ours = start()
    if rank == 1:
        event()
        raise ValueError("wrong on this rank only")
    ours.barrier()


def raises_while_others_work() -> None:
    start()
    if rank == last:
        event()
        raise ValueError("wrong on this rank only")
    time.sleep(LONG)


def mismatch() -> None:
    ours = start()
    event()
    ours.all_reduce(np.ones(4 if rank == 1 else 3))


def earlier_hook() -> None:
    sys.excepthook = lambda *details: sys.stderr.write(f"HOOK {details[1]}\n")
    raises()


def later_hook() -> None:
    ours = start()
    sys.excepthook = lambda *details: sys.stderr.write(f"HOOK {details[1]}\n")
    if rank == 1:
        event()
        raise ValueError("wrong on this rank only")
    ours.barrier()


def serialized() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = start()
    print(f"rank {rank}: {[str(warning.message) for warning in caught]}\n", end="", flush=True)
    ours.barrier()
    if rank == 1:
        event()
        raise ValueError("wrong on this rank only")
    ours.barrier()


def last_rank_leaves() -> None:
    ours = start()
    if rank == last:
        event()
        sys.exit(0)
    print("printed before", end="")
    ours.barrier()


def first_rank_leaves() -> None:
    ours = start()
    if rank == 0:
        event()
        sys.exit(0)
    ours.barrier()


def end_of_script() -> None:
    """The others come to the collective late: only then is it the end."""
    ours = start()
    if rank != last:
        time.sleep(2)
        event()
        ours.all_reduce(np.ones(7), reducing(label="late"))


def leaves_a_split() -> None:
    part = start().split(rank // 2)
    part.barrier()
    if rank == last:
        event()
        sys.exit(0)
    if rank == last - 1:
        part.barrier()
    else:
        time.sleep(LONG)


def leaves_while_others_raise_together() -> None:
    ours = start()
    if rank == last:
        event()
        sys.exit(0)
    ours.raise_together(ValueError("wrong operand"))


def some_ranks_only() -> None:
    """The last rank of the world is another program, which never heard of us."""
    part = world.Split(0 if rank != last else MPI.UNDEFINED)
    if rank == last:
        time.sleep(LONG)
    ours = start(part)
    if rank == 1:
        event()
        sys.exit(0)
    ours.barrier()


def larger_group_later() -> None:
    """Two ranks are watched first, then all; rank 1 leaves the larger group."""
    if rank < 2:
        start(world.Create_group(world.group.Incl([0, 1])))
    ours = start()
    if rank == 1:
        event()
        sys.exit(0)
    ours.barrier()


def works_on() -> None:
    """Rank 0 writes its results, after all others have left. It may even use a communicator of its own."""
    ours = start()
    alone = communicator_for(world.Split(rank))
    ours.barrier()
    if rank == 0:
        time.sleep(4)
        alone.barrier()
        print("results written", flush=True)


def exits_with_3() -> None:
    start()
    if rank == 1:
        event()
        sys.exit(3)
    time.sleep(LONG)


def all_exit_with_3() -> None:
    start()
    event()
    sys.exit(3)


def caught_exit() -> None:
    start()
    with contextlib.suppress(SystemExit):
        sys.exit(3)
    if rank == 0:
        time.sleep(3)


def _child(fails: bool) -> None:
    if fails:
        raise ValueError("in a child")
    sys.exit(5)


def children() -> None:
    ours = start()
    fork = multiprocessing.get_context("fork")
    for fails in (True, False):
        process = fork.Process(target=_child, args=(fails,))
        process.start()
        process.join()
        assert process.exitcode == (1 if fails else 5)
    pid = os.fork()
    if pid == 0:
        # With its own excepthook and atexit handlers, as a child that does not use multiprocessing.
        import atexit

        atexit.register(os._exit, 7)  # instead of the MPI_Finalize that this child inherited
        raise ValueError("in a plain fork")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    ours.barrier()
    print("children done", flush=True)


def finalizes() -> None:
    start()
    if rank == 0:
        time.sleep(1)
    MPI.Finalize()
    print("finalized", flush=True)


def leaves_by_finalize() -> None:
    ours = start()
    if rank == last:
        event()
        MPI.Finalize()
        return
    ours.barrier()


def last_blocks() -> None:
    """All but the last rank wait in a collective; so does that one, for a message that nobody sends."""
    ours = start()
    ready()
    if rank == last:
        world.recv(source=0)
    ours.barrier()


def last_sleeps() -> None:
    ours = start()
    ready()
    if rank == last:
        time.sleep(LONG)
    ours.barrier()


def handles_interrupts() -> None:
    """Ctrl-C is the program's own business if it says so."""
    ours = start()
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    os.kill(os.getpid(), signal.SIGINT)
    if rank == last:
        time.sleep(4)  # the others are blocked meanwhile
    ours.barrier()
    assert asked


globals()[name]()
