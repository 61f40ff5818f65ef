"""`Pauses`: the times in which a job stood still, because they do not count as waiting."""

from __future__ import annotations

import time
from collections.abc import Collection

from mpistrat.liveness import deadlines
from mpistrat.liveness.observer.failure_detector import ObservedRank


class Pauses:
    """Remembers when this node's ranks stood still, so that the time of a suspended job does not count as waiting."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._pauses: list[tuple[float, float]] = []  # (end, seconds)

    def notice(self, ranks: Collection[ObservedRank]) -> None:
        """Count the time since the last look as a pause if all living ranks stand still, or if it exceeds 2 s.

        A rank stands still if its process is stopped. More than 2 s mean that the observer was suspended, too.
        Called by: the observer, at each look.
        """
        gap = time.monotonic() - self._looked
        self.restart()
        alive = [rank for rank in ranks if not rank.dead]
        all_stand_still = alive and all(rank.stands_still for rank in alive)
        if all_stand_still or gap > deadlines.OBSERVER_STOOD_STILL:
            self._pauses.append((self._looked, gap))

    def restart(self) -> None:
        """Let the time since the last look begin now.

        Called by: the observer after a report, because it was busy and not suspended.
        """
        self._looked = time.monotonic()

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since `moment` (by `time.monotonic()`), less all pauses that ended after `moment`."""
        paused = sum(seconds for end, seconds in self._pauses if end > moment)
        return time.monotonic() - moment - paused
