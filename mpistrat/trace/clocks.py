"""How clocks of different nodes differ: estimated by round trips, and in between by a straight line.

The ranks of a node share CLOCK_MONOTONIC and need none of this. Of other nodes' clocks it counts from their start, and
runs faster or slower by what crystals differ, some 10 us in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    return min(comparisons, key=lambda comparison: comparison.error)


class Alignment:
    """Turns times of one clock into those of another, which it was compared with.

    Between the first comparison and the last the difference changes evenly; before and after it stays.
    """

    def __init__(self, comparisons: Sequence[Comparison]) -> None:
        ordered = sorted(comparisons, key=lambda comparison: comparison.at)
        self._first, self._last = ordered[0], ordered[-1]
        self.error = max(self._first.error, self._last.error)

    def __call__(self, time: int) -> int:
        first, last = self._first, self._last
        span = last.at - first.at
        if span == 0:
            return time + first.ahead
        passed = min(max(time - first.at, 0), span)
        return time + first.ahead + (last.ahead - first.ahead) * passed // span
