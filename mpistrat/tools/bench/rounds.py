"""How contestants are compared in one run: in each round, all take their turn."""

from __future__ import annotations

import functools
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.communicators import Communicator
from mpistrat.communicators.costs.distance import distance_on_node
from mpistrat.communicators.of_resolver import communicator_of

ROUNDS = 9
# How long a turn should last where the number of calls is not fixed
SECONDS_PER_TURN = 0.1


def all_ranks() -> Communicator:
    """The communicator of all ranks of the job. Called by: every rank."""
    communicator = communicator_of(MPIClusterResolver(), "always", "mpistrat-bench")
    distance_before()
    return communicator


def distance_now() -> float:
    """Between this rank's core and the next one's of its node, in seconds. Called by: every rank."""
    mpi = sys.modules.get("mpi4py.MPI")
    return distance_on_node(mpi.COMM_WORLD) if mpi else 0.0


@functools.cache
def distance_before() -> float:
    """`distance_now()` when the benchmark began."""
    return distance_now()


def first_reason(reason: str) -> str:
    """The reason of the first rank that has one; "" where none has. Called by: every rank."""
    return next(filter(None, all_ranks().all_gather_object(reason)), "")


def host_of_rank() -> str:
    """The name by which other ranks reach this one. Called by: every rank."""
    host = socket.gethostname()
    return host if len(set(all_ranks().all_gather_object(host))) > 1 else "127.0.0.1"


def seconds_of(
    communicator: Communicator,
    call: Callable[[], object],
    calls: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> float:
    """Seconds per call, of `calls` calls that all ranks begin together, on the slowest rank. Called by: every rank.

    `wait` is called before them and after the last, and is a part of their time: it returns when the rank's device has
    nothing more to do.
    """
    wait()
    communicator.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return max(communicator.all_gather_object(time.perf_counter() - started)) / calls


def take_turns(turns: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """What each contestant's turn returned, in each round."""
    rounds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(num_rounds):
        for name, turn in turns.items():
            rounds[name].append(turn())
    return rounds


def compare(
    contestants: Mapping[str, Callable[[], object]],
    repeat: int | None = None,
    num_rounds: int = ROUNDS,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Microseconds per call, of each round; a round times `repeat` calls of each contestant in turn.

    Called by: every rank. A turn's time is the slowest rank's. `repeat`: None for as many as 0.1 s allow. `wait`: as of
    `seconds_of`.
    """
    communicator = all_ranks()
    for call in contestants.values():
        for _ in range(max(2, (repeat or 1) // 10)):
            call()
    if repeat is None:
        longest = max(seconds_of(communicator, call, 1, wait) for call in contestants.values())
        repeat = max(1, round(SECONDS_PER_TURN / longest))

    def turn(call: Callable[[], object], calls: int) -> float:
        return seconds_of(communicator, call, calls, wait) * 1e6

    turns = {name: functools.partial(turn, call, repeat) for name, call in contestants.items()}
    return take_turns(turns, num_rounds)


def medians(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median round of each contestant."""
    return {name: statistics.median(times) for name, times in rounds.items()}
