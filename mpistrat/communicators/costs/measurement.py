"""What ways cost: all ranks measure them together, once, or read the file of an earlier job.

Ranks must decide alike, so the first rank fits the costs and sends them to the others. A time is that of the slowest
rank.
"""

from __future__ import annotations

import collections
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.costs import cache
from mpistrat.communicators.costs.model import Cost, fitted
from mpistrat.machine.cpu_model import cpu_model
from mpistrat.machine.network_links import network_links
from mpistrat.settings import cache_folder, transport_settings

# Sizes that are timed: from the smallest that goes another way than MPI's to more than the caches of a core hold.
SIZES = (1 << 15, 1 << 17, 1 << 19, 1 << 21)
LARGEST = SIZES[-1]
# Of buffers on a device, which are fast with larger ones only.
SIZES_ON_DEVICE = (1 << 17, 1 << 19, 1 << 21, 1 << 23)
# Rounds that are timed, after a first in which pages and connections are missing.
ROUNDS = 9
SECONDS = 0.3  # for all rounds on a node; a call that has begun ends, too
SECONDS_BETWEEN_NODES = 0.2  # for the ways of each slice, and as long for those of all ranks
# Ranks spin while they wait. If one had less of its core, other programs, or ranks without a core, disturbed it.
LEAST_CPU_SHARE = 0.9
# From so many bytes on a way is taken if time ran out.
UNMEASURED = 1 << 18
# A way that costs so many times as much at the largest size is never taken; else it is for larger buffers, which gain
# by it.
CLEARLY = 1.25

Way = Callable[[Any], object]

costs_of_this_job: dict[str, Costs] = {}  # by key, where this process is the first rank


@dataclass(frozen=True)
class Costs:
    """The costs of the ways between the ranks of a communicator, equal on all of them.

    Attributes:
        ways: the costs by name; empty if time ran out.
        origin: where they come from, for people.
        disturbed: other programs ran, too, so that a way may look slower than it is.
        largest: the largest size that is measured.
    """

    ways: Mapping[str, Cost] = field(default_factory=dict)
    origin: str = "not measured yet"
    disturbed: bool = False
    largest: int = LARGEST

    def cheaper_from(self, way: str, other: str, floor: int, clearly: float = CLEARLY) -> float:
        """The number of bytes from which on `way` is taken, not `other`: `floor` at least; infinite for never.

        From `largest` on it is taken, unless it costs more than `clearly` times as much there, undisturbed.
        """
        if not self.ways:
            return max(floor, UNMEASURED)
        this, that = self.ways[way], self.ways[other]
        dearer = this.seconds(self.largest) > clearly * that.seconds(self.largest)
        if dearer and not self.disturbed:
            return math.inf
        return max(floor, math.ceil(min(self.largest, this.cheaper_from(that))))

    def explain(self) -> str:
        """A line for each way, and where they come from."""
        lines = [f"    {way}: {cost}" for way, cost in self.ways.items()]
        return "\n".join([*lines, f"    {self.origin}"])

    def explain_from(self, smallest: float) -> str:
        """For people: a way is taken from `smallest` bytes on, by these costs."""
        if self is NOT_MEASURED:
            return "once something large has been combined"
        sizes = "never" if math.isinf(smallest) else f"from {smallest:.0f} bytes on"
        return f"{sizes}; of S bytes an all-reduce takes\n{self.explain()}"


NOT_MEASURED = Costs()


@dataclass(frozen=True)
class Memory:
    """Where the buffers lie that are combined.

    Attributes:
        name: tells costs in different memory apart: "NVIDIA H100".
        sizes: that are timed, in bytes.
        zeros: makes so many float32 there, all of them 0.
    """

    name: str
    sizes: Sequence[int]
    zeros: Callable[[int], Any]


HOST = Memory("host", SIZES, lambda length: np.zeros(length, np.float32))


def costs_of(
    ways: Mapping[str, Way],
    communicator: Communicator,
    mpi: str,
    ranks_of_nodes: Sequence[int],
    *,
    abreast: int = 1,
    asleep: Collection[str] = (),
    memory: Memory = HOST,
) -> Costs:
    """The costs of `ways` to all-reduce. Collective over `communicator`; it takes less than half a second.

    Args:
        ways: each combines an array of zeros in `memory` in place with those of all ranks, and returns when that is
            done.
        mpi: the library's name and version.
        ranks_of_nodes: the number of ranks of each node, the same on all ranks.
        abreast: the number of such communicators over the same nodes that measure at the same time.
        asleep: the ways that leave the core while they wait.
    """
    mine = (cpu_model(), len(os.sched_getaffinity(0)), network_links())
    everyone = communicator.all_gather_object(mine)
    key = {
        "ways": sorted(ways),
        "mpi": mpi,
        "settings": transport_settings(),
        "ranks_of_nodes": sorted(ranks_of_nodes),
        "abreast": abreast,
        "memory": [memory.name, *memory.sizes],
        "nodes": sorted([*node, ranks] for node, ranks in collections.Counter(everyone).items()),
    }
    folder = cache_folder()
    costs = _known(folder, key, ways, memory.sizes[-1]) if communicator.rank == 0 else None
    known: Costs | None = communicator.broadcast_object(costs)
    if known is not None:
        return known
    seconds = SECONDS if len(ranks_of_nodes) == 1 else SECONDS_BETWEEN_NODES
    buffers = [memory.zeros(nbytes // 4) for nbytes in memory.sizes]
    measured = measure(ways, buffers, communicator, seconds, asleep)
    if communicator.rank == 0:
        costs = costs_of_this_job[repr(key)] = _fitted(ways, memory.sizes, measured, seconds)
        if folder is not None and costs.ways and not costs.disturbed:
            cache.write(folder, key, dict(costs.ways))
    return communicator.broadcast_object(costs)


def _known(
    folder: str | None, key: dict[str, Any], ways: Mapping[str, Way], largest: int
) -> Costs | None:
    """The costs that another communicator of this process, or another job, has measured."""
    if repr(key) in costs_of_this_job:
        return costs_of_this_job[repr(key)]
    found = None if folder is None else cache.read(folder, key)
    if folder is None or found is None or found[0].keys() != ways.keys():
        return None
    costs = {way: found[0][way] for way in ways}
    path = cache.path_of(folder, key)
    home = os.path.expanduser("~")
    shown = path.replace(home, "~", 1) if path.startswith(f"{home}/") else path
    origin = f"measured {_date(found[1])}, read from {shown}"
    return Costs(costs, origin, largest=largest)


@dataclass(frozen=True)
class Measured:
    """Times of calls, equal on all ranks.

    Attributes:
        seconds: by round, size and way; of the slowest rank. There are fewer sizes if time ran out.
        cpu_share: the share of its core that a rank had in ways that wait awake; the smallest of all ranks.
    """

    seconds: np.ndarray
    cpu_share: float


def measure(
    ways: Mapping[str, Way],
    buffers: Sequence[Any],
    communicator: Communicator,
    seconds: float,
    asleep: Collection[str] = (),
) -> Measured:
    """Time rounds of all ways and buffers, ROUNDS of them if `seconds` suffice by the slowest rank's clock. Collective.

    In a round each way takes its turn, so that whatever else the machine does hits all of them alike.
    """
    rounds: list[list[np.ndarray]] = []
    started = time.perf_counter()
    awake = ran = 0.0
    in_time = True
    while in_time and len(rounds) <= ROUNDS:
        rows: list[np.ndarray] = []
        rounds.append(rows)
        for buffer in buffers:
            took = np.empty(len(ways) + 1)
            for i, (name, way) in enumerate(ways.items()):
                begun, ran_before = time.perf_counter(), time.thread_time()
                way(buffer)
                took[i] = time.perf_counter() - begun
                if name not in asleep:
                    awake += took[i]
                    ran += time.thread_time() - ran_before
            took[-1] = time.perf_counter() - started
            communicator.all_reduce(took, "max")
            rows.append(took[:-1])
            in_time = bool(took[-1] < seconds)
            if not in_time:
                break
    share = np.array(ran / awake if awake else 1.0)
    communicator.all_reduce(share, "min")
    whole = [rows for rows in rounds[1:] if len(rows) == len(buffers)]
    return Measured(np.array(whole or rounds[:1]), float(share))


def _fitted(
    ways: Mapping[str, Way], sizes: Sequence[int], measured: Measured, seconds: float
) -> Costs:
    """Lines through the medians of the rounds."""
    rounds, known, _ = measured.seconds.shape
    if known < 2:
        return Costs({}, f"not measured: calls of two sizes took longer than {seconds:g} s")
    medians = np.median(measured.seconds, axis=0)
    costs = {way: fitted(sizes[:known], list(medians[:, i])) for i, way in enumerate(ways)}
    disturbed = measured.cpu_share < LEAST_CPU_SHARE
    origin = f"measured {_date(time.time())}, in this job: medians of {rounds} calls of each of {known} sizes"
    if disturbed:
        share = f"{100 * measured.cpu_share:.0f} %"
        origin += f"; other programs or ranks left a rank {share} of its core, so it is not kept for other jobs"
    return Costs(costs, origin, disturbed, sizes[-1])


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
