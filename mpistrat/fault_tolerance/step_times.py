"""Measures how long steps take."""

from __future__ import annotations

import time

# The part of the longest time that is kept at each step: a step of ten times the usual length counts for 230 steps.
_REMEMBERED = 0.99


class StepTimes:
    """The times from one step to the next, in seconds, input included.

    Attributes:
        mean: mean time; 0.0 before the second step.
        longest: longest of the last times: it shrinks by 1 % at each step. 0.0 before the second step.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.longest = 0.0
        self._intervals = 0
        self._last: float | None = None

    def step(self) -> None:
        """Record the time since the last call. Called once in each step, always at the same place."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            self._intervals += 1
            self.mean += (took - self.mean) / self._intervals
            self.longest = max(took, _REMEMBERED * self.longest)
        self._last = now
