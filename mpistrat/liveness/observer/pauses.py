"""The moments in which a job stood still, and so has not waited."""

from __future__ import annotations

import time
from collections.abc import Collection

from mpistrat.liveness import deadlines
from mpistrat.liveness.observer.failure_detector import ObservedRank


class Pauses:
    """When this node's ranks stood still: a job that was suspended has not waited meanwhile."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._pauses: list[tuple[float, float]] = []  # (end, seconds)

    def notice(self, ranks: Collection[ObservedRank]) -> None:
        """Called at each look. The clock went on, or this process did, but no rank could."""
        gap = time.monotonic() - self._looked
        self.restart()
        alive = [rank for rank in ranks if not rank.dead]
        all_stand_still = alive and all(rank.stands_still for rank in alive)
        if all_stand_still or gap > deadlines.OBSERVER_STOOD_STILL:
            self._pauses.append((self._looked, gap))

    def restart(self) -> None:
        """The time since the last look was no pause: the observer was busy."""
        self._looked = time.monotonic()

    def seconds_since(self, moment: float) -> float:
        """How long ago that was by `time.monotonic`, without the pauses."""
        paused = sum(seconds for end, seconds in self._pauses if end > moment)
        return time.monotonic() - moment - paused
