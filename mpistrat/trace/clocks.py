"""Measure by round trips how clocks of different nodes differ, and convert times of one clock into another's.

The ranks of a node share CLOCK_MONOTONIC and need no comparison. On another node this clock counts from that node's
start, and runs faster or slower by some 10 us in a second, because crystals differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

ROUNDS = 20
_Clock = Callable[[], int]  # returns a clock's time, in ns


@dataclass(frozen=True)
class Comparison:
    """One comparison of this process's clock with another clock. All times are nanoseconds.

    Attributes:
        at: a time of this process's clock.
        ahead: the other clock's time minus this clock's, at that time; negative if the other clock was behind.
        error: the largest possible error of `ahead`.
    """

    at: int
    ahead: int
    error: int


def compare(ask: _Clock, now: _Clock) -> Comparison:
    """Compare two clocks by Cristian's algorithm, and return the comparison of the shortest of `ROUNDS` round trips.

    The other clock was read within the round trip; the best guess is its middle, with an error of at most half of the
    round trip. Source: Probabilistic clock synchronization, Distributed Computing 3, 1989, pages 146-158.

    Args:
        ask: returns the time of the other clock, in ns.
        now: returns the time of this process's clock, in ns.
    Returns: the comparison. Its `ahead` (in ns) is positive if the clock of `ask` is ahead of this process's clock.
    """
    comparisons = []
    for _ in range(ROUNDS):
        sent = now()
        reading = ask()
        received = now()
        middle = sent + (received - sent) // 2
        error = (received - sent + 1) // 2
        comparisons.append(Comparison(middle, reading - middle, error))
    return min(comparisons, key=lambda comparison: comparison.error)


def compare_with(comm: MPI.Intracomm, rank: int, now: _Clock) -> Comparison:
    """Compare this process's clock with the clock of `rank` in `comm`. That rank must call `answer` at the same time.

    Args: now: returns the time of this process's clock, in ns.
    """
    time = np.zeros(1, np.int64)

    def ask() -> int:
        comm.Send(time, rank)
        comm.Recv(time, rank)
        return int(time[0])

    return compare(ask, now)


def answer(comm: MPI.Intracomm, rank: int, now: _Clock) -> None:
    """Answer the `compare_with` of `rank` in `comm`: send it the time of this process's clock `ROUNDS` times.

    Args: now: returns the time of this process's clock, in ns.
    """
    time = np.zeros(1, np.int64)
    for _ in range(ROUNDS):
        comm.Recv(time, rank)
        time[0] = now()
        comm.Send(time, rank)


class Alignment:
    """Converts times of one clock, in ns, into times of another clock that it was compared with.

    Between the first and the last comparison, the difference of the clocks changes evenly. Before and after, it is
    constant.

    Args: comparisons: one or more comparisons of the first clock with the second, in any order; two of them count.
    Attributes:
        error: the larger error of the first and the last comparison, in ns.
    """

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        ordered = sorted(comparisons, key=lambda comparison: comparison.at)
        self._first = ordered[0]
        self._last = ordered[-1]
        self.error = max(self._first.error, self._last.error)

    def __call__(self, time: int) -> int:
        first = self._first
        last = self._last
        span = last.at - first.at
        passed = min(max(time - first.at, 0), span)
        change = (last.ahead - first.ahead) * passed
        return time + first.ahead + change // max(span, 1)
