"""Measures how long steps take."""

from __future__ import annotations

import time

# The part of the longest time that is kept at each step: a step of ten times the usual length counts for 230 steps.
_REMEMBERED = 0.99


class StepTimes:
    """The durations of steps, input included.

    Attributes:
        mean: mean time from one call of `step` to the next, in seconds; 0.0 before the second call.
        longest: longest of the last times, in seconds; it shrinks by 1 % at each step. 0.0 before the second call.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.longest = 0.0
        self._intervals = 0
        self._last: float | None = None

    def step(self) -> None:
        """Record the time since the last call. Called at the same place of every step, such as its end."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            self._intervals += 1
            self.mean += (took - self.mean) / self._intervals
            self.longest = max(took, _REMEMBERED * self.longest)
        self._last = now
