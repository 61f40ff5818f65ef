"""Measurements of jobs, and whether there are enough.

Other programs on a machine can only increase a time. So the least time of several jobs comes nearer to the undisturbed
time with each job, and one quiet job is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# At least ENOUGH jobs measure. Up to MOST measure, as long as the newest was clearly faster than the jobs before it.
ENOUGH = 3
MOST = 5
CLEARLY_FASTER = 0.9
# Two distances (times of copies between cores) are near if neither is more than this many times the other. Between
# cores without a common cache a copy takes three times as long; if other threads use a core, too, up to 1.4 times as
# long.
NEAR = 1.5


@dataclass(frozen=True)
class Observation:
    """The times that one job has measured.

    Attributes:
        when: seconds since 1970.
        distance: the distance between the ranks' cores: the seconds of a copy between them; 0 where none was measured.
        seconds: from a route's name to the least time of each size, in seconds, from the smallest size on; fewer sizes
            if the job ran out of time.
    """

    when: float
    distance: float
    seconds: Mapping[str, Sequence[float]]

    def is_possible(self) -> bool:
        """Whether clocks can have given these numbers: times are positive and finite, and the distance not negative."""
        times = np.concatenate([[self.when], *self.seconds.values()])
        are_times = 0 < times.min() <= times.max() < math.inf
        return bool(self.distance >= 0 and are_times)


def are_near(*distances: float) -> bool:
    return max(distances) <= NEAR * min(distances)


def least_of(observations: Sequence[Observation]) -> dict[str, list[float]]:
    """Return for each route's name the least time of each size over all jobs; infinity for a size that none timed."""
    least: dict[str, list[float]] = {}
    for way in observations[0].seconds:
        of_jobs = [observation.seconds[way] for observation in observations]
        of_sizes = itertools.zip_longest(*of_jobs, fillvalue=math.inf)
        least[way] = [min(times) for times in of_sizes]
    return least


def suffice(observations: Sequence[Observation]) -> bool:
    """Whether no other job needs to measure: MOST jobs have, or ENOUGH have and the last was not clearly faster."""
    if not ENOUGH <= len(observations) < MOST:
        return len(observations) >= MOST
    before = least_of(observations[:-1])
    newest = observations[-1].seconds
    for way, times in newest.items():
        pairs = itertools.zip_longest(times, before[way], fillvalue=math.inf)
        if any(now < CLEARLY_FASTER * then for now, then in pairs):
            return False
    return True
