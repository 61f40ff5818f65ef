"""Measurements of jobs, and whether they suffice.

Other programs on a machine can only increase a time. So the least times of several jobs come nearer to the true ones
with each job, in any order, and one quiet job among disturbed ones decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

# At least ENOUGH jobs measure; more, up to MOST, while the newest was clearly faster than the jobs before it.
ENOUGH, MOST = 3, 5
CLEARLY_FASTER = 0.9
# Two distances are near if neither is more than this many times the other. Without a common cache the distance is three
# times as large; if other threads use a core, too, it is up to 1.4 times as large.
NEAR = 1.5


@dataclass(frozen=True)
class Observation:
    """The times that one job has measured.

    Attributes:
        when: seconds since 1970.
        distance: the distance between the ranks' cores, in seconds; 0 where it does not matter.
        seconds: by route, the least time of each size, from the smallest size on; fewer sizes if time ran out.
    """

    when: float
    distance: float
    seconds: Mapping[str, Sequence[float]]

    def is_possible(self) -> bool:
        """Whether clocks can have given these numbers: times are positive and finite, and the distance not negative."""
        times = np.array([self.when, *itertools.chain(*self.seconds.values())])
        return bool(self.distance >= 0 and times.min() > 0 and times.max() < math.inf)


def are_near(*distances: float) -> bool:
    return max(distances) <= NEAR * min(distances)


def least_of(observations: Sequence[Observation]) -> dict[str, list[float]]:
    """Return by route the least time of each size; infinity for a size without a time. All have the same routes."""
    times = {way: [o.seconds[way] for o in observations] for way in observations[0].seconds}
    return {way: [*map(min, zip_longest(*of, fillvalue=math.inf))] for way, of in times.items()}


def suffice(observations: Sequence[Observation]) -> bool:
    """Whether no other job needs to measure. The newest observation is the last."""
    if not ENOUGH <= len(observations) < MOST:
        return len(observations) >= MOST
    before, newest = least_of(observations[:-1]), observations[-1].seconds
    return not any(
        now < CLEARLY_FASTER * then
        for way in newest
        for now, then in zip_longest(newest[way], before[way], fillvalue=math.inf)
    )
