"""Compares contestants (functions that do the same work) in one run: in each round, each of them is timed once."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.communicators import Communicator
from mpistrat.communicators.costs.distance import distance_on_node
from mpistrat.communicators.of_resolver import communicator_of

_Call = Callable[[], object]
Contestants = dict[str, Callable[[], Any]]
Results = dict[
    str, list[float]
]  # by name, such as a contestant's, the result of each round or step

ROUNDS = 9
# How long a turn (the calls of one contestant in a round) lasts if the number of its calls is not given
SECONDS_PER_TURN = 0.1


class UsageError(Exception):
    """The arguments do not fit the job or its files. Every rank raises it; the command line prints the message."""


class CannotTakePart(Exception):
    """A peer is installed but cannot do this work here. The message says why."""


def check_on_host(device: object) -> None:
    """Raise CannotTakePart unless `device` is a CPU. Called by: Horovod's and TensorFlow's steps, on every rank."""
    if not str(device).startswith("cpu"):
        raise CannotTakePart(f"is compared on CPUs only, not on {device}")


def all_ranks() -> Communicator:
    """Return the communicator of all ranks of the job. Called by: every rank.

    The first call also measures `distance_before`.
    """
    communicator = communicator_of(MPIClusterResolver(), "always", "mpistrat-bench")
    distance_before()
    return communicator


def distance_now() -> float:
    """Return the seconds that this rank and the node's next rank take to hand each other 128 KB by shared memory.

    Shorter times mean that the two cores share a cache. 0.0 if MPI is not loaded.   Called by: every rank.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    return distance_on_node(mpi.COMM_WORLD) if mpi else 0.0


@functools.cache
def distance_before() -> float:
    """Return `distance_now()` of the first call, when the benchmark began. Called by: every rank."""
    return distance_now()


def first_reason(reason: str) -> str:
    """Return the `reason` of the lowest rank that gives one, on all ranks; "" if all give "". Called by: every rank."""
    reasons = all_ranks().all_gather_object(reason)
    return next(filter(None, reasons), "")


def _of_host() -> None:
    """Return at once: the host has nothing to wait for."""


def seconds_of(
    communicator: Communicator,
    call: _Call,
    calls: int = 1,
    wait: Callable[[], None] = _of_host,
) -> float:
    """Return the slowest rank's mean seconds per call, over `calls` calls of `call`. All ranks get the same number.

    All ranks begin together, after a barrier.   Called by: every rank.
    Args:
        wait: waits until the rank's device has nothing more to do. It is called before the barrier, and after the last
            call as a part of the measured time.
    """
    wait()
    communicator.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return max(communicator.all_gather_object(time.perf_counter() - started)) / calls


def take_turns(turns: Mapping[str, Callable[[], float]], num_rounds: int) -> Results:
    """Call each function of `turns` once in each round, one after the other. Returns: by name, the results in order."""
    rounds: Results = {name: [] for name in turns}
    for _ in range(num_rounds):
        for name, turn in turns.items():
            rounds[name].append(turn())
    return rounds


def compare(
    contestants: Mapping[str, _Call],
    repeat: int | None = None,
    num_rounds: int = ROUNDS,
    wait: Callable[[], None] = _of_host,
) -> Results:
    """Time the contestants: in each of `num_rounds` rounds, each contestant is called `repeat` times in a row.

    Called by: every rank. A few calls before the first round are not timed.
    Args:
        contestants: by name, the functions to compare; they do the same work, collectively.
        repeat: the calls of a contestant in a round; None: as many as the slowest contestant makes in 0.1 s.
        wait: waits until the rank's device has nothing more to do.
    Returns: by contestant, a list with a number for each round: the slowest rank's mean microseconds per call.
    """
    communicator = all_ranks()
    for call in contestants.values():
        for _ in range(max(2, (repeat or 1) // 10)):
            call()
    if repeat is None:
        longest = max(seconds_of(communicator, call, 1, wait) for call in contestants.values())
        repeat = max(1, round(SECONDS_PER_TURN / longest))

    def turn(call: _Call, calls: int) -> float:
        return seconds_of(communicator, call, calls, wait) * 1e6

    turns = {name: functools.partial(turn, call, repeat) for name, call in contestants.items()}
    return take_turns(turns, num_rounds)


def medians(rounds: Results) -> dict[str, float]:
    """Return for each contestant the median of its rounds, in the unit of `rounds`."""
    return {name: statistics.median(times) for name, times in rounds.items()}
