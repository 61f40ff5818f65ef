"""Measures one collective at a range of sizes, beside the limit of the machine. Prints the columns of nccl-tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.communicators import Communicator
from mpistrat.tools.bench.device import HOST, Device
from mpistrat.tools.bench.operations import Operation
from mpistrat.tools.bench.report import Row, aligned, distance_in_words, oversubscription
from mpistrat.tools.bench.rounds import seconds_of

WARM_UP = 3
# How many seconds one size may take after its warm-up, and the fewest and the most calls for it.
SECONDS_PER_SIZE = 2.0
FEWEST_CALLS = 5
MOST_CALLS = 2000

# A column's name, unit, width in characters, and cell
_COLUMNS = (
    ("size", "(B)", 12, "{bytes}"),
    ("count", "(elements)", 12, "{count}"),
    ("type", "", 9, "{type}"),
    ("redop", "", 6, "{redop}"),
    ("time", "(us)", 11, "{time:.1f}"),
    ("p50", "(us)", 11, "{p50:.1f}"),
    ("p99", "(us)", 11, "{p99:.1f}"),
    ("algbw", "(GB/s)", 8, "{algbw:.2f}"),
    ("busbw", "(GB/s)", 8, "{busbw:.2f}"),
    ("#wrong", "", 7, "{wrong}"),
    ("% of", "limit", 7, "{percent_of_limit:.0f}"),
)
_WIDTHS = [width for _, _, width, _ in _COLUMNS]


def sizes(smallest: int, largest: int, factor: int) -> Iterator[int]:
    while smallest <= largest:
        yield smallest
        smallest *= factor


def measure(
    kind: type[Operation],
    communicator: Communicator,
    nbytes: int,
    dtype: np.dtype[Any],
    *,
    in_window: bool = False,
    calls: int | None = None,
    device: Device = HOST,
) -> Row:
    """Measure one collective at one size. Collective; all ranks return the same row.

    The time of a call begins when all ranks have left a barrier and their devices have nothing to do. It ends on a rank
    when the rank's device has the result.
    Args:
        nbytes: the size in bytes, as nccl-tests counts it.
        in_window: whether `AllReduce` works in memory that the ranks of a node share.
        calls: the number of timed calls; None: as many as fit into two seconds, 5 to 2000.
    Returns: the results. Times are microseconds; the time of a call is its slowest rank's.
        bytes, count: the size in bytes and in elements, as nccl-tests counts them.
        type, redop: the dtype's name, and "sum" or "none".
        calls: the number of timed calls.
        time, p50, p99: the mean, the median, and the 99th percentile of the calls' times.
        algbw, busbw: bandwidths in 1e9 bytes per second, from the median.
        wrong: wrong elements on all ranks, in the first and in the last call.
        limit: the median time for a copy of as many bytes on all ranks at once.
        percent_of_limit: 100 · limit / p50.
        slowest_rank: the rank with the largest median of its own times.
        slowest_ratio: the slowest rank's median, divided by the median of all ranks' medians.
        samples: the time of every call.
    """
    operation = kind(communicator, nbytes, dtype, in_window, device)
    seconds = [_timed(operation)]
    wrong = operation.wrong()
    seconds += [_timed(operation) for _ in range(WARM_UP - 1)]
    if calls is None:
        planned = np.array(SECONDS_PER_SIZE / max(seconds[-1], 1e-7))
        communicator.all_reduce(planned, "min")
        calls = min(max(FEWEST_CALLS, int(planned)), MOST_CALLS)
    times = np.array([_timed(operation) for _ in range(calls)]) * 1e6
    wrong += operation.wrong()

    of_ranks = np.stack(communicator.all_gather(times))
    samples = of_ranks.max(axis=0)
    medians = np.median(of_ranks, axis=1)
    p50 = float(np.median(samples))
    limit = _copying(communicator, operation.nbytes, calls, device)
    algbw = operation.nbytes / p50 / 1e3
    return {
        "bytes": operation.nbytes,
        "count": operation.count,
        "type": dtype.name,
        "redop": operation.redop,
        "calls": calls,
        "time": float(samples.mean()),
        "p50": p50,
        "p99": float(np.percentile(samples, 99)),
        "algbw": algbw,
        "busbw": algbw * kind.bus_factor(communicator.size),
        "wrong": sum(communicator.all_gather_object(wrong)),
        "limit": limit,
        "percent_of_limit": 100 * limit / p50,
        "slowest_rank": int(medians.argmax()),
        "slowest_ratio": float(medians.max() / np.median(medians)),
        "samples": samples.round(3).tolist(),
    }


def _timed(operation: Operation) -> float:
    operation.reset()
    operation.device.wait()
    operation.communicator.barrier()
    started = time.perf_counter()
    operation()
    operation.device.wait()
    return time.perf_counter() - started


def _copying(communicator: Communicator, nbytes: int, calls: int, device: Device) -> float:
    """Return the time in microseconds that one copy of `nbytes` bytes takes while all ranks copy. Collective.

    Each rank copies within its device's memory. The time of a turn, one copy on each rank, is the slowest rank's time.

    Args: calls: the number of turns, at most 50 of them; turns to warm up come before, and do not count.
    Returns: the median of the turns, the same number on all ranks.
    """
    source = device.array(np.ones(nbytes, np.uint8))
    target = device.array(np.ones(nbytes, np.uint8))

    def copy() -> None:
        target[:] = source

    turns = range(min(calls, 50) + WARM_UP)
    seconds = [seconds_of(communicator, copy, 1, device.wait) for _ in turns]
    return float(np.median(seconds[WARM_UP:])) * 1e6


def heading(operation: str, ranks: int, device: Device) -> str:
    place = device if device.is_host else f"the memory of {device}"
    names = aligned((name for name, *_ in _COLUMNS), _WIDTHS)
    units = aligned((unit for _, unit, *_ in _COLUMNS), _WIDTHS)
    return f"# {operation} over {ranks} ranks, in {place}\n#\n#{names}\n#{units}"


def line(row: Row) -> str:
    cells = (cell.format_map(row) for *_, cell in _COLUMNS)
    return " " + aligned(cells, _WIDTHS)


def footer(rows: Sequence[Row], where: Row) -> list[str]:
    slowest = max(rows, key=lambda row: row["slowest_ratio"])
    wrong = sum(row["wrong"] for row in rows)
    verdict = "FAILED" if wrong else "OK"
    bandwidth = sum(row["busbw"] for row in rows) / len(rows)
    lines = [
        f"Out of bounds values: {wrong} {verdict}",
        f"Average bus bandwidth: {bandwidth:.3f} GB/s",
        f"Slowest rank: {slowest['slowest_rank']}, {slowest['slowest_ratio']:.2f} times the median of the ranks at "
        f"{slowest['bytes']} bytes",
        *where["ways"],
        *distance_in_words(where),
        *oversubscription(where),
    ]
    return [f"# {text}" for text in lines]
