"""Measure how fast each pair of nodes exchanges bytes, and find links that are slower than the other links.

Every node is paired with every other node once. In each round all nodes exchange at the same time (a round-robin
tournament by the circle method: Kirkman, On a problem in combinations, 1847). All rounds together take two seconds, for
any number of nodes: on more than 400 nodes, some rounds are left out.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.errors import counted
from mpistrat.tools.doctor.facts import JobFacts, grouped
from mpistrat.tools.doctor.finding import Findings, Level, findings_of

if TYPE_CHECKING:
    from mpi4py import MPI

ok, warning, problem = findings_of("network")
SECONDS = 2.0
SHORTEST_ROUND = 0.005  # seconds
# Bytes of a message
SMALLEST = 64 << 10
LARGEST = 16 << 20
# Times the median rate of the other pairs
SLOW = 0.5
VERY_SLOW = 0.25
UNUSED = 0.2  # times the speed of the fastest device
MOST_NAMED = 5
_Pair = tuple[int, int]  # the numbers of two nodes
_Rates = dict[_Pair, float]  # bytes per second
# Headings of docs/troubleshooting.md
_SLOW = "The link is slow"


def partner(node: int, turn: int, nodes: int) -> int | None:
    """Return the node that `node` measures with in round `turn`, from 0 to `rounds(nodes)` - 1; None if it has none."""
    # The last node, for an even number of nodes. For an odd number, this node does not exist, and its partner rests.
    fixed = rounds(nodes)
    if node == fixed:
        half = (fixed + 1) // 2
        other = turn * half % fixed  # 2 * other = turn, modulo an odd number
    else:
        other = (turn - node) % fixed
        if other == node:
            other = fixed
    if other < nodes:
        return other
    return None


def rounds(nodes: int) -> int:
    return nodes - 1 + nodes % 2


def turns(nodes: int, seconds: float = SECONDS) -> list[int]:
    """Return the numbers of the rounds to measure in: all if each gets 5 ms in `seconds`, else some, evenly spread."""
    every = rounds(nodes)
    played = min(every, int(seconds / SHORTEST_ROUND))
    return [turn * every // played for turn in range(played)]


def measure(
    leaders: MPI.Intracomm, begin: Callable[[int], None], seconds: float = SECONDS
) -> list[list[float]]:
    """Measure the rates between this node and every other node, or some of them if there is no time for all.

    Called by: the first rank of each node.
    Args:
        leaders: the communicator of these ranks, in the order of the nodes.
        begin: called before each measurement, with the number of the other node.
        seconds: the time for all rounds together.
    Returns: lists [this node, other node, bytes per second], only for the pairs in which this node has the lower
        number.
    """
    data = np.zeros(LARGEST, np.uint8)
    rates = []
    rank = leaders.rank
    played = turns(leaders.size, seconds)
    leaders.Barrier()
    started = time.perf_counter()
    for index, turn in enumerate(played):
        other = partner(rank, turn, leaders.size)
        if other is None:
            continue
        begin(other)
        if rank < other:
            until = started + (index + 1) * seconds / len(played)
            rate = _lead(leaders, other, data, until)
            rates.append([rank, other, rate])
        else:
            _follow(leaders, other, data)
    return rates


def _lead(comm: MPI.Intracomm, other: int, data: np.ndarray, until: float) -> float:
    """Exchange messages with `other` until the time `until`, larger messages while there is time.

    `other` calls `_follow`. A message without bytes tells it that this was all.
    Returns: bytes per second: twice the largest size, divided by the median time of its round trips.
    """
    _exchange(comm, other, data[:1])  # MPI connects at the first message
    size = SMALLEST
    samples: list[float] = []
    while True:
        took = _exchange(comm, other, data[:size])
        samples.append(took)
        left = until - time.perf_counter()
        if left < took:
            break
        if size < LARGEST and left > 3 * 2 * took:  # enough for three messages of twice the size
            size *= 2
            samples.clear()
    no_bytes = np.zeros(1, np.int64)
    comm.Send(no_bytes, other)
    return 2 * size / statistics.median(samples)


def _exchange(comm: MPI.Intracomm, other: int, data: np.ndarray) -> float:
    size = np.full(1, len(data), np.int64)
    comm.Send(size, other)
    started = time.perf_counter()
    comm.Send(data, other)
    comm.Recv(data, other)
    return time.perf_counter() - started


def _follow(comm: MPI.Intracomm, other: int, data: np.ndarray) -> None:
    size = np.zeros(1, np.int64)
    while True:
        comm.Recv(size, other)
        if not size[0]:
            return
        message = data[: size[0]]
        comm.Recv(message, other)
        comm.Send(message, other)


def check(job: JobFacts) -> Findings:
    links = job.links
    if links is None or not links.rates:
        return
    names = list(job.nodes())
    rates: _Rates = {}
    for a, b, rate in links.rates:
        rates[int(a), int(b)] = rate
    slow = slower_than_others(rates)
    yield from _named(slow, rates, names)
    fast = [rate for pair, rate in rates.items() if pair not in slow]
    yield from _unused(max(fast), links.speeds)
    if not slow:
        nodes = counted(len(names), "node")
        speeds = _range(min(fast), max(fast))
        measured = len(rates)
        some = f" ({measured} of {links.pairs} pairs)" if measured < links.pairs else ""
        median = _speed(statistics.median(fast))
        middle = f", the median is {median}" if len(fast) > 2 else ""
        yield ok(f"{nodes} exchange {speeds} with each other{some}{middle}.")


def slower_than_others(rates: _Rates) -> _Rates:
    """Return the pairs with less than half the median rate of the other pairs; for each pair, that median.

    Args: rates: bytes per second of each pair of nodes.
    """
    ordered = sorted(rates.values())
    found: _Rates = {}
    if len(ordered) < 2:
        return found
    for pair, rate in rates.items():
        median = _median_without(ordered, bisect.bisect_left(ordered, rate))
        if rate < SLOW * median:
            found[pair] = median
    return found


def _median_without(ordered: Sequence[float], index: int) -> float:
    left = len(ordered) - 1
    low = (left - 1) // 2
    high = left // 2
    # The entries behind `index` have moved one place.
    low += low >= index
    high += high >= index
    return (ordered[low] + ordered[high]) / 2


def _named(slow: _Rates, rates: _Rates, names: Sequence[str]) -> Findings:
    """Yield findings: each node that is slow with every other node, then the five slowest of the remaining pairs.

    Args: slow: for each slow pair, the median rate of the other pairs.   names: the names of the nodes.
    """
    slow_nodes = _slow_nodes(slow.keys(), rates)
    for node, pairs in slow_nodes.items():
        name = names[node]
        median = statistics.median(slow[pair] for pair in pairs)
        speeds = [rates[pair] for pair in pairs]
        lowest = min(speeds)
        highest = max(speeds)
        bad = _bad(highest, median)
        yield bad(
            f"{name} is slow with every other node: {_range(lowest, highest)} of {_speed(median)} "
            "(median of the others).",
            f"leave it out (srun --exclude={name}), and have its cable, port and speed looked at (ethtool, "
            "ibstat)",
            _SLOW,
        )
    links = [pair for pair in slow if slow_nodes.keys().isdisjoint(pair)]
    links.sort(key=rates.__getitem__)
    for a, b in links[:MOST_NAMED]:
        name = names[a]
        other = names[b]
        rate = _speed(rates[a, b])
        median = slow[a, b]
        yield _bad(rates[a, b], median)(
            f"The link {name} <-> {other} is slow: {rate} of {_speed(median)} (median of the others).",
            "run the doctor again, for another job may use the link now; else leave one node out "
            f"(srun --exclude={other}), and have the cables and switches between them looked at",
            _SLOW,
        )
    more = len(links) - MOST_NAMED
    if more > 0:
        yield warning(f"{more} more pairs of nodes are slow.", "see all in --json", _SLOW)


def _slow_nodes(slow: Set[_Pair], pairs: Iterable[_Pair]) -> dict[int, list[_Pair]]:
    """Return the nodes that are slow in all their measured pairs, at least two; for each node, these pairs.

    Args: slow: the slow ones of `pairs`.
    """
    pairs_of = grouped((node, pair) for pair in pairs for node in pair)
    return {
        node: measured
        for node, measured in sorted(pairs_of.items())
        if len(measured) > 1 and slow >= set(measured)
    }


def _unused(best: float, speeds: Sequence[Sequence[str]]) -> Findings:
    """Find an MPI with rates below a fifth of a network device's speed: it seems to use another device.

    Args: best: the highest rate, in bytes per second.   speeds: for each node, the speeds of its devices as text.
    """
    if not speeds or not all(speeds):
        return
    fastest = []
    for node in speeds:
        devices = [(bytes_of_link(text), text) for text in node]
        fastest.append(max(devices))
    speed, text = min(fastest)
    if best < UNUSED * speed:
        yield warning(
            f"No two nodes exchange more than {_speed(best)}, and each has a link of {text} ({_speed(speed)}): does "
            "MPI use it?",
            "name it: UCX_NET_DEVICES=mlx5_0:1 (see ucx_info -d) or --mca pml ucx for Open MPI, FI_PROVIDER=verbs or "
            "cxi for libfabric; in a container, bind /dev/infiniband and the host's libraries",
            "No two nodes exchange more than",
        )


def bytes_of_link(text: str) -> float:
    """Return the bytes per second of a speed in words: "25000 Mb/s" or "200 Gb/sec (4X HDR)"."""
    number, unit = text.split()[:2]
    bits = {"G": 1e9, "M": 1e6}[unit[0]]
    return float(number) * bits / 8


def _bad(rate: float, median: float) -> Level:
    """Return the function `problem` for a rate below a quarter of the median of the other pairs, else `warning`."""
    if rate < VERY_SLOW * median:
        return problem
    return warning


def _range(low: float, high: float) -> str:
    if _speed(low) == _speed(high):
        return _speed(low)
    return f"{_speed(low)} to {_speed(high)}"


def _speed(rate: float) -> str:
    gigabytes = rate / 1e9
    if rate < 1e9:
        return f"{gigabytes:.2g} GB/s"
    return f"{gigabytes:.1f} GB/s"
