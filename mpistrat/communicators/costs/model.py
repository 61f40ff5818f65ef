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
        error = max(self.error, other.error)
        return Cost(self.alpha + other.alpha, self.beta + other.beta, error)

    def cheaper_from(self, other: Cost) -> float:
        """Return the least number of bytes for which this route costs no more than `other`; infinity for never."""
        if self.beta > other.beta or (self.beta == other.beta and self.alpha > other.alpha):
            return math.inf
        if self.alpha <= other.alpha:
            return 0.0
        return (self.alpha - other.alpha) / (other.beta - self.beta)

    def __str__(self) -> str:
        speed = f" ({1e-9 / self.beta:.3g} GB/s)" if self.beta else ""
        return (
            f"{self.alpha * 1e6:.3g} us + {self.beta * 1e9:.3g} ns per byte{speed}, fitted within "
            f"{100 * self.error:.0f} %"
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
    terms = np.stack([1 / times, np.asarray(nbytes, float) / largest / times], axis=1)
    ones = np.ones(len(times))
    found: np.ndarray = np.linalg.lstsq(terms, ones, rcond=None)[0]
    if found.min() < 0:  # fit the other term alone
        kept = int(found.argmax())
        found = np.zeros(2)
        found[kept] = terms[:, kept].sum() / (terms[:, kept] ** 2).sum()
    error = math.sqrt(((terms @ found - 1) ** 2).mean())
    return Cost(float(found[0]), float(found[1]) / largest, error)


def slowest(costs: Iterable[Cost]) -> Cost:
    """Return the cost with the largest `alpha`, the largest `beta` and the largest `error` of `costs`."""
    return Cost(*map(max, zip(*map(astuple, costs), strict=True)))


def fitted_in_two(nbytes: Sequence[int], seconds: Sequence[float]) -> tuple[int, Cost, Cost]:
    """Fit one line to the smaller sizes and one to the larger: a byte costs more where buffers exceed the caches.

    The sizes are divided where the squares of both lines' errors are least; each line gets at least three.

    Args:
        nbytes: at least six sizes, in ascending order.
        seconds: the time of each size, > 0.

    Returns: the largest size of the first line, and the costs of both lines.
    """

    def error(cut: int) -> float:
        lines = fitted(nbytes[:cut], seconds[:cut]), fitted(nbytes[cut:], seconds[cut:])
        return cut * lines[0].error ** 2 + (len(nbytes) - cut) * lines[1].error ** 2

    best = min(range(3, len(nbytes) - 2), key=error)
    lower, upper = fitted(nbytes[:best], seconds[:best]), fitted(nbytes[best:], seconds[best:])
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
    return Cost(steps * latency, 2 * (nodes - 1) / nodes * seconds_per_byte)


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
