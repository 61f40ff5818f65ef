"""What jobs have measured, and whether that suffices.

Whatever else a machine does can only raise a time. So the least times of several jobs come nearer with each job, in any
order, and one quiet job among disturbed ones decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

# So many jobs measure at least; more of them, up to MOST, while the newest was clearly faster than those before it.
ENOUGH, MOST = 3, 5
CLEARLY_FASTER = 0.9
# Two distances are near if neither is more than so many times the other. Without a common cache they are three times as
# far, and where others use a core, too, up to 1.4 times.
NEAR = 1.5


@dataclass(frozen=True)
class Observation:
    """What one job has measured.

    Attributes:
        when: in seconds since 1970.
        distance: between the ranks' cores, in seconds; 0 where it does not matter.
        seconds: by way, the least time of each size, from the smallest size on; of fewer sizes if time ran out.
    """

    when: float
    distance: float
    seconds: Mapping[str, Sequence[float]]

    def is_possible(self) -> bool:
        """Whether clocks can have given these numbers."""
        times = np.array([self.when, *itertools.chain(*self.seconds.values())])
        return bool(self.distance >= 0 and times.min() > 0 and times.max() < math.inf)


def are_near(*distances: float) -> bool:
    return max(distances) <= NEAR * min(distances)


def least_of(observations: Sequence[Observation]) -> dict[str, list[float]]:
    """By way, the least time of each size. All observations have the same routes."""
    times = {way: [o.seconds[way] for o in observations] for way in observations[0].seconds}
    return {way: [*map(min, zip_longest(*of, fillvalue=math.inf))] for way, of in times.items()}


def suffice(observations: Sequence[Observation]) -> bool:
    """Whether no other job need measure. The newest is the last."""
    if not ENOUGH <= len(observations) < MOST:
        return len(observations) >= MOST
    before, newest = least_of(observations[:-1]), observations[-1].seconds
    return not any(
        now < CLEARLY_FASTER * then
        for way in newest
        for now, then in zip_longest(newest[way], before[way], fillvalue=math.inf)
    )
