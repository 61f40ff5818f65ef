"""How long steps take."""

from __future__ import annotations

import time

# So much of the longest step is remembered at the next: one ten times as long as the others counts for 230 of them.
_REMEMBERED = 0.99


class StepTimes:
    """Attributes: mean, longest: seconds from one step to the next, input and all; 0 before the second.

    `longest` is of the last steps.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self.longest = 0.0
        self._intervals = 0
        self._last: float | None = None

    def step(self) -> None:
        """A step begins, or always: a step ends."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            self._intervals += 1
            self.mean += (took - self.mean) / self._intervals
            self.longest = max(took, _REMEMBERED * self.longest)
        self._last = now
