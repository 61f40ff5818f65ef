"""The cost of a collective by its size, fitted to measured times; and the size from which one route is cheaper.

t(S) = alpha + beta S: a start-up time, and a time for each byte (R. W. Hockney, "The communication challenge for MPP:
Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994). How both grow with the number of ranks is known for the
algorithms of MPI (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
International Journal of High Performance Computing Applications 19, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np


@dataclass(frozen=True)
class Cost:
    """The cost of a route, as a line over the number of bytes.

    Attributes:
        alpha: seconds for a call without bytes.
        beta: seconds per byte.
        error: the root mean square of (fitted - measured) / measured; 0.05 means 5 %.
    """

    alpha: float
    beta: float
    error: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes

    def followed_by(self, other: Cost) -> Cost:
        """Return the cost of this route followed by `other`: both times are added, and the larger error counts."""
        alpha = self.alpha + other.alpha
        beta = self.beta + other.beta
        error = max(self.error, other.error)
        return Cost(alpha, beta, error)

    def cheaper_from(self, other: Cost) -> float:
        """Return the least number of bytes for which this route costs no more than `other`; infinity for never."""
        if self.alpha <= other.alpha and self.beta <= other.beta:
            return 0.0
        if self.beta >= other.beta:
            return math.inf
        later = self.alpha - other.alpha
        gain = other.beta - self.beta
        return later / gain

    def __str__(self) -> str:
        speed = f" ({1e-9 / self.beta:.3g} GB/s)" if self.beta else ""
        microseconds = self.alpha * 1e6
        nanoseconds = self.beta * 1e9
        percent = 100 * self.error
        return (
            f"{microseconds:.3g} us + {nanoseconds:.3g} ns per byte{speed}, fitted within "
            f"{percent:.0f} %"
        )


def fitted(nbytes: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Return the cost: the line with the least squares of relative errors, so that small sizes count, too.

    `alpha` and `beta` are at least 0: a negative one is set to 0, and the other fitted alone.

    Args:
        nbytes: at least two sizes, in bytes.
        seconds: the measured time of each size, > 0.
    """
    times = np.asarray(seconds, float)
    largest = max(nbytes)
    sizes = np.asarray(nbytes, float) / largest
    terms = np.stack([1 / times, sizes / times], axis=1)
    ones = np.ones(len(times))
    found: np.ndarray = np.linalg.lstsq(terms, ones, rcond=None)[0]
    if found.min() < 0:  # fit the other term alone
        kept = int(found.argmax())
        term = terms[:, kept]
        found = np.zeros(2)
        found[kept] = term.sum() / (term**2).sum()
    errors = terms @ found - 1
    error = math.sqrt((errors**2).mean())
    alpha, beta = found.tolist()
    return Cost(alpha, beta / largest, error)


def slowest(costs: Iterable[Cost]) -> Cost:
    """Return the cost with the largest `alpha`, the largest `beta` and the largest `error` of `costs`."""
    rows = np.array([astuple(cost) for cost in costs])
    alpha, beta, error = rows.max(axis=0).tolist()
    return Cost(alpha, beta, error)


def fitted_in_two(nbytes: Sequence[int], seconds: Sequence[float]) -> tuple[int, Cost, Cost]:
    """Fit one line to the smaller sizes and one to the larger: a byte costs more where buffers exceed the caches.

    The sizes are divided where the squares of both lines' errors are least; each line gets at least three.

    Args:
        nbytes: at least six sizes, in ascending order.
        seconds: the time of each size, > 0.

    Returns: the largest size of the first line, and the costs of both lines.
    """

    def error(cut: int) -> float:
        lower, upper = lines(cut)
        above = len(nbytes) - cut
        return cut * lower.error**2 + above * upper.error**2

    def lines(cut: int) -> tuple[Cost, Cost]:
        lower = fitted(nbytes[:cut], seconds[:cut])
        upper = fitted(nbytes[cut:], seconds[cut:])
        return lower, upper

    best = min(range(3, len(nbytes) - 2), key=error)
    lower, upper = lines(best)
    return nbytes[best - 1], lower, upper


def over_nodes(nodes: int, latency: float, seconds_per_byte: float) -> Cost:
    """Return the cost of an all-reduce between `nodes`, by Rabenseifner's algorithm: reduce-scatter, then all-gather.

    Each of the two has log2(N) steps (rounded up), and sends (N - 1) / N of the bytes (Thakur et al., section 4.5; here
    the time of a byte includes its addition).

    Args:
        nodes: number of nodes, N.
        latency: seconds that a message without bytes takes.
        seconds_per_byte: seconds that a link needs to move a byte.
    """
    steps = 2 * math.ceil(math.log2(nodes))
    sent = 2 * (nodes - 1) / nodes
    return Cost(steps * latency, sent * seconds_per_byte)


def link(between: Cost, nodes: int) -> tuple[float, float]:
    """Derive what a message between two nodes costs from the measured cost of an all-reduce. Inverse of `over_nodes`.

    Called by: `mpistrat-bench plan`.

    Args:
        between: the measured cost of an all-reduce between nodes.
        nodes: number of these nodes, at least 2.

    Returns: seconds that a message without bytes takes, and seconds that a link needs to move a byte.
    """
    unit = over_nodes(nodes, 1.0, 1.0)
    return between.alpha / unit.alpha, between.beta / unit.beta
