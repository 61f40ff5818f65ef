"""One collective over a range of sizes, beside what the machine could do at most."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mpistrat.communicators import Communicator
from mpistrat.tools.bench.operations import Operation

WARM_UP = 3
# As long as one size may take, beside its warm-up; at least so many calls.
SECONDS_PER_SIZE = 2.0
FEWEST_CALLS, MOST_CALLS = 5, 2000


@dataclass
class Row:
    """What was measured at one size. Times are microseconds; a call's is the slowest rank's.

    Attributes:
        bytes, count: as nccl-tests counts them.
        calls: how many were timed.
        time, p50, p99: the mean, the median, and what 99 of 100 calls stay below.
        algbw, busbw: 1e9 bytes per second, of the median.
        wrong: elements that were not what they must be, of all ranks, in the first and the last call.
        limit: the median of all ranks at once copying as many bytes.
        percent_of_limit: 100 · limit / p50.
        slowest_rank, slowest_ratio: whose median is the largest, and how many times the median of the ranks.
        samples: every call's time.
    """

    bytes: int
    count: int
    type: str
    redop: str
    calls: int
    time: float
    p50: float
    p99: float
    algbw: float
    busbw: float
    wrong: int
    limit: float
    percent_of_limit: float
    slowest_rank: int
    slowest_ratio: float
    samples: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes(smallest: int, largest: int, factor: int) -> Iterator[int]:
    size = smallest
    while size <= largest:
        yield size
        size *= factor


def measure(
    kind: type[Operation],
    communicator: Communicator,
    nbytes: int,
    dtype: np.dtype[Any],
    *,
    in_window: bool = False,
    calls: int | None = None,
) -> Row:
    """Collective. `calls`: None for as many as fit into two seconds."""
    operation = kind(communicator, nbytes, dtype, in_window)
    size = communicator.size
    wrong = 0
    for i in range(WARM_UP):
        seconds = _timed(operation)
        wrong += operation.wrong() if i == 0 else 0
    if calls is None:
        planned = np.array(SECONDS_PER_SIZE / max(seconds, 1e-7))
        communicator.all_reduce(planned, "min")
        calls = min(max(FEWEST_CALLS, int(planned)), MOST_CALLS)
    own = np.array([_timed(operation) for _ in range(calls)]) * 1e6
    wrong += operation.wrong()

    everyone = np.stack(communicator.all_gather(own))
    samples = everyone.max(axis=0)
    medians = np.median(everyone, axis=1)
    p50 = float(np.median(samples))
    limit = _copying(communicator, operation.nbytes, calls)
    algbw = operation.nbytes / p50 / 1e3
    return Row(
        bytes=operation.nbytes,
        count=operation.count,
        type=dtype.name,
        redop=operation.redop,
        calls=calls,
        time=float(samples.mean()),
        p50=p50,
        p99=float(np.percentile(samples, 99)),
        algbw=algbw,
        busbw=algbw * kind.bus_factor(size),
        wrong=sum(communicator.all_gather_object(wrong)),
        limit=limit,
        percent_of_limit=100 * limit / p50,
        slowest_rank=int(medians.argmax()),
        slowest_ratio=float(medians.max() / np.median(medians)),
        samples=[round(float(sample), 3) for sample in samples],
    )


def _timed(operation: Operation) -> float:
    operation.reset()
    operation.communicator.barrier()
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def _copying(communicator: Communicator, nbytes: int, calls: int) -> float:
    """Microseconds in which all ranks at once copy `nbytes` each."""
    source, target = np.ones((2, nbytes), np.uint8)
    own = []
    for _ in range(min(calls, 50) + WARM_UP):
        communicator.barrier()
        started = time.perf_counter()
        np.copyto(target, source)
        own.append((time.perf_counter() - started) * 1e6)
    everyone = np.stack(communicator.all_gather(np.array(own[WARM_UP:])))
    return float(np.median(everyone.max(axis=0)))
