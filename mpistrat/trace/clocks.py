"""How clocks of different nodes differ: estimated by round trips, and in between by a straight line.

The ranks of a node share CLOCK_MONOTONIC and need none of this. Of other nodes' clocks it counts from their start, and
runs faster or slower by what crystals differ, some 10 us in a second.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

ROUNDS = 20


@dataclass(frozen=True)
class Comparison:
    """At `at` of one's own clock, another was `ahead` ns ahead of it, give or take `error`."""

    at: int
    ahead: int
    error: int


def compare(ask: Callable[[], int], now: Callable[[], int]) -> Comparison:
    """Cristian's algorithm (Probabilistic clock synchronization, Distributed Computing 3, 1989, pages 146-158).

    The other clock was read within the round trip, at its middle for all one knows; so the error is at most half of
    it, and the shortest of `ROUNDS` is the best.
    Args:
        ask: gets the time of the other clock, in ns.
        now: reads one's own.
    """
    comparisons = []
    for _ in range(ROUNDS):
        sent = now()
        reading = ask()
        received = now()
        middle = sent + (received - sent) // 2
        comparisons.append(Comparison(middle, reading - middle, (received - sent + 1) // 2))
    return min(comparisons, key=operator.attrgetter("error"))


def compare_with(comm: MPI.Intracomm, rank: int, now: Callable[[], int]) -> Comparison:
    """Compare by messages with the clock of `rank` of `comm`. Meanwhile that rank calls `answer`."""
    time = np.zeros(1, np.int64)

    def ask() -> int:
        comm.Send(time, rank)
        comm.Recv(time, rank)
        return int(time[0])

    return compare(ask, now)


def answer(comm: MPI.Intracomm, rank: int, now: Callable[[], int]) -> None:
    """Tell `rank` of `comm` the time as often as its `compare_with` asks for it."""
    time = np.zeros(1, np.int64)
    for _ in range(ROUNDS):
        comm.Recv(time, rank)
        time[0] = now()
        comm.Send(time, rank)


class Alignment:
    """Turns times of one clock into those of another, which it was compared with.

    Between the first comparison and the last the difference changes evenly; before and after it stays.
    """

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        ordered = sorted(comparisons, key=operator.attrgetter("at"))
        self._first, self._last = ordered[0], ordered[-1]
        self.error = max(self._first.error, self._last.error)

    def __call__(self, time: int) -> int:
        first, last = self._first, self._last
        span = last.at - first.at
        if span == 0:
            return time + first.ahead
        passed = min(max(time - first.at, 0), span)
        return time + first.ahead + (last.ahead - first.ahead) * passed // span
