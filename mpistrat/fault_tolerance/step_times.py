"""Measures how long steps take."""

from __future__ import annotations

import time

# `longest` is multiplied by this at each step, so a step of ten times the usual length is forgotten after 230 steps.
_REMEMBERED = 0.99


class StepTimes:
    """The times from the end of one step to the end of the next, in seconds, with the time for reading input.

    Attributes:
        mean: mean of all times; 0.0 before the second step.
        longest: longest of the last times. It shrinks by 1 % at each step, until a longer time comes. 0.0 before the
            second step.
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
