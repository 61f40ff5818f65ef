"""What routes cost: all ranks measure them together, once, or read what earlier jobs have measured.

Ranks must decide alike, so the first rank reads, fits and decides, and sends the costs to the others. A time is that of
the slowest rank. While a job runs its costs stay.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.costs import cache
from mpistrat.communicators.costs.model import Cost, fitted
from mpistrat.communicators.costs.observations import (
    ENOUGH,
    Observation,
    are_near,
    least_of,
    suffice,
)
from mpistrat.liveness import deadlines
from mpistrat.machine.cpu_model import cpu_model
from mpistrat.machine.network_links import network_links
from mpistrat.machine.shared_caches import caches_of
from mpistrat.settings import cache_folder, transport_settings

# Sizes that are timed: from the smallest that goes another way than MPI's to more than the caches of a core hold.
SIZES = (1 << 15, 1 << 17, 1 << 19, 1 << 21)
# Of a node's memory: a way may win at one size and lose at the next, as long as caches hold the buffers.
SIZES_ON_NODE = tuple(1 << power for power in range(15, 26))
# Of buffers on a device, which are fast with larger ones only.
SIZES_ON_DEVICE = (1 << 17, 1 << 19, 1 << 21, 1 << 23)
# Rounds that are timed, after a first in which pages and connections are missing.
ROUNDS = 9
# A way is called so often with a buffer in a round, or as often as deadlines.RANK_MEASURES_CALLS allows.
_CALLS = 8
_ONCE = 1 << 23  # Buffers of more bytes are timed in one round only.
# Ranks spin while they wait. If one had less of its core, other programs, or ranks without a core, disturbed it.
LEAST_CPU_SHARE = 0.9
# From so many bytes on a way is taken if time ran out.
UNMEASURED = 1 << 18
# A way that costs so many times as much at the largest size is never taken; else it is for larger buffers, which gain
# by it.
CLEARLY = 1.25

Route = Callable[[Any], object]

# By key, where this process is the first rank; and how far apart the ranks' cores were.
costs_of_this_job: dict[str, tuple[float, Costs]] = {}


@dataclass(frozen=True)
class Costs:
    """The costs of the routes between the ranks of a communicator, equal on all of them.

    Attributes:
        routes: the costs by name; empty if time ran out.
        origin: where they come from, for people.
        disturbed: for people: other programs ran, too, when this job measured.
        jobs: how many have measured them.
        sizes: that are measured, in ascending order.
        seconds: by way, the least time of each size.
    """

    routes: Mapping[str, Cost] = field(default_factory=dict)
    origin: str = "not measured yet"
    disturbed: bool = False
    jobs: int = ENOUGH
    sizes: Sequence[int] = SIZES
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def cheaper_from(self, way: str, other: str, floor: int, clearly: float = CLEARLY) -> float:
        """The number of bytes from which on `way` is taken, not `other`: `floor` at least; infinite for never.

        From the largest size on that is measured it is taken, unless it costs more than `clearly` times as much there.
        Fewer jobs than ENOUGH do not prove that: others may have disturbed them.
        """
        if not self.routes:
            return max(floor, UNMEASURED)
        this, that, largest = self.routes[way], self.routes[other], self.sizes[-1]
        dearer = this.seconds(largest) > clearly * that.seconds(largest)
        if dearer and self.jobs >= ENOUGH:
            return math.inf
        return max(floor, math.ceil(min(largest, this.cheaper_from(that))))

    def borders(self, way: str, other: str, floor: int) -> list[float]:
        """The sizes at which another way is taken: `way` from the first on, `other` from the second on, and so on.

        They lie amid two sizes of which the one way and the other take less time. Of larger buffers than could be
        timed, the lines decide. Fewer jobs than ENOUGH do not prove that `way` is dearer after the largest size.
        """
        if not self.routes:
            return [max(floor, UNMEASURED)]
        found: list[float] = []
        smaller = 0
        times = self.seconds[way], self.seconds[other]
        for size, this, that in zip(self.sizes, *times, strict=False):
            if (this <= that) == (len(found) % 2 == 0):
                found.append(max(floor, math.sqrt(smaller * size)))
            smaller = size
        later = math.inf
        if smaller < self.sizes[-1]:
            later = self.routes[way].cheaper_from(self.routes[other])
        if self.jobs < ENOUGH:
            later = min(later, self.sizes[-1])
        if len(found) % 2 == 0 and later < math.inf:
            found.append(max(smaller, later))
        return found

    def explain(self) -> str:
        """A line for each way, and where they come from."""
        lines = [f"    {way}: {cost}" for way, cost in self.routes.items()]
        return "\n".join([*lines, f"    {self.origin}"])

    def explain_from(self, *borders: float) -> str:
        """For people: a way is taken from the first of `borders` on, up to the second, and so on, by these costs."""
        if self is NOT_MEASURED:
            return "once something large has been combined"
        starts = [f"from {border:.0f} " for border in borders[::2] if border < math.inf]
        ends = [f"to {border:.0f} bytes" for border in borders[1::2]]
        pairs = itertools.zip_longest(starts, ends, fillvalue="bytes on")
        ranges = " and ".join(map("".join, pairs)) or "never"
        return f"{ranges}; of S bytes an all-reduce takes\n{self.explain()}"


NOT_MEASURED = Costs()


@dataclass(frozen=True)
class BufferMemory:
    """Where the buffers lie that are combined.

    Attributes:
        name: tells costs in different memory apart: "NVIDIA H100".
        sizes: that are timed, in bytes.
        zeros: makes so many float32 there, all of them 0.
    """

    name: str
    sizes: Sequence[int]
    zeros: Callable[[int], Any]


def written(length: int) -> np.ndarray:
    """As a program's buffers: pages that nobody has written are all the same zeros."""
    return np.full(length, 0, np.float32)


HOST = BufferMemory("host", SIZES, written)


def costs_of(
    routes: Mapping[str, Route],
    communicator: Communicator,
    mpi: str,
    ranks_of_nodes: Sequence[int],
    *,
    abreast: int = 1,
    asleep: Collection[str] = (),
    memory: BufferMemory = HOST,
    distance: Callable[[], float] = float,
) -> Costs:
    """The costs of `routes` to all-reduce. Collective over `communicator`; it takes less than half a second.

    Args:
        routes: each combines an array of zeros in `memory` in place with those of all ranks, and returns when that is
            done.
        mpi: the library's name and version.
        ranks_of_nodes: the number of ranks of each node, the same on all ranks.
        abreast: the number of such communicators over the same nodes that measure at the same time.
        asleep: the routes that leave the core while they wait.
        distance: measures how far apart the ranks' cores are, in seconds; costs at another distance are not used. By
            default it is 0.
    """
    cpus = os.sched_getaffinity(0)
    cores = (cpu_model(), len(cpus), network_links())
    cores_of_ranks, caches_of_ranks, distances = zip(
        *communicator.all_gather_object((cores, caches_of(cpus), distance())), strict=True
    )
    here = max(distances)
    key = {
        "ways": sorted(routes),
        "mpi": mpi,
        "settings": transport_settings(),
        "ranks_of_nodes": sorted(ranks_of_nodes),
        "abreast": abreast,
        "memory": [memory.name, *memory.sizes],
        "nodes": sorted([*cores, ranks] for cores, ranks in Counter(cores_of_ranks).items()),
        "caches": sorted(
            [name.split()[0], ranks]
            for name, ranks in Counter(itertools.chain(*caches_of_ranks)).items()
        ),
    }
    first = communicator.rank == 0
    kept = _kept(key, here) if first else []
    known: Costs | None = communicator.broadcast_object(_known(kept, key, here))
    if known is None:
        buffers = [memory.zeros(nbytes // 4) for nbytes in memory.sizes]
        measured = measure(routes, buffers, communicator, _limit(key), asleep, distance, here)
        costs = _joined(kept, measured, here, routes, key) if first else None
        known = communicator.broadcast_object(costs)
    if first:
        costs_of_this_job[repr(key)] = here, known
    return known


def _known(kept: Sequence[Observation], key: dict[str, Any], here: float) -> Costs | None:
    """The costs that this job, or enough earlier ones, have measured at about the distance `here`; None: no others."""
    there, costs = costs_of_this_job.get(repr(key), (math.inf, None))
    if costs is not None and are_near(here, there):
        return costs
    return _fitted(kept, key, f"measured {_read(kept, key)}") if suffice(kept) else None


def _kept(key: dict[str, Any], here: float) -> list[Observation]:
    """What earlier jobs have measured at about the distance `here`, the newest last."""
    return [
        observation
        for observation in cache.read(_folder(), key)
        if are_near(observation.distance, here)
        and observation.seconds.keys() == set(key["ways"])
        and all(1 < len(times) < len(key["memory"]) for times in observation.seconds.values())
    ]


class Measured(NamedTuple):
    """Times of calls, equal on all ranks.

    Attributes:
        seconds: by round, size and way; of the slowest rank. There are fewer sizes if time ran out.
        cpu_share: the share of its core that a rank had in routes that wait awake; the smallest of all ranks.
        stayed: the ranks' cores stayed as far from each other as they were before.
    """

    seconds: np.ndarray
    cpu_share: float
    stayed: bool = True


def measure(
    routes: Mapping[str, Route],
    buffers: Sequence[Any],
    communicator: Communicator,
    seconds: float,
    asleep: Collection[str] = (),
    distance: Callable[[], float] = float,
    here: float = 0.0,
) -> Measured:
    """Time ROUNDS rounds of all routes and buffers, fewer if the slowest rank needs more than `seconds`. Collective.

    In a round each way takes its turn, so that whatever else the machine does hits all of them alike; in every second
    round in the opposite order.
    Args: here: the `distance` between the ranks' cores that is expected.
    """
    rounds: list[list[np.ndarray]] = []
    started = time.perf_counter()
    awake = ran = 0.0
    distances = []
    for number, (size, buffer) in itertools.product(range(1 + ROUNDS), enumerate(buffers)):
        if not size:
            rounds.append([])
        turns = list(enumerate(routes.items()))[:: (-1) ** number]
        calls = _calls(buffer.nbytes, [rows[size] for rows in rounds[:-1]])
        took = np.empty((calls, len(routes)))
        for (i, (name, route)), call in itertools.product(turns, range(calls)):
            took[call, i], on_core = _timed(route, buffer, communicator)
            if name not in asleep:
                awake += took[call, i]
                ran += on_core
        slowest = np.append(took, [distance(), time.perf_counter() - started])
        communicator.all_reduce(slowest, "max")
        rounds[-1].append(slowest[:-2].reshape(took.shape).min(axis=0, initial=math.inf))
        distances.append(slowest[-2])
        if slowest[-1] >= seconds:
            break
    share = np.array(ran / awake if awake else 1.0)
    communicator.all_reduce(share, "min")
    stayed = are_near(here, float(np.median(distances)))
    return Measured(_times_of(rounds, len(buffers)), float(share), stayed)


def _timed(route: Route, buffer: Any, communicator: Communicator) -> tuple[float, float]:
    """The seconds of a call, and the seconds of them in which this thread ran. Collective."""
    if isinstance(buffer, np.ndarray):
        buffer[...] = 0  # as a program has just written what it combines
    communicator.barrier()
    began, ran_before = time.perf_counter(), time.thread_time()
    route(buffer)
    return time.perf_counter() - began, time.thread_time() - ran_before


def _times_of(rounds: Sequence[Sequence[np.ndarray]], sizes: int) -> np.ndarray:
    """As of `Measured`: of the whole rounds after the first; else of the first, and of the next as far as it went."""
    first, *later = rounds
    whole = [times for times in later if len(times) == sizes]
    warm = [*itertools.chain(*later[:1])]
    return np.array(whole or [[*warm, *first[len(warm) :]]])


def _calls(nbytes: int, before: Sequence[np.ndarray]) -> int:
    """How often each way is called with a buffer in a round. Args: before: the rounds before it."""
    if nbytes > _ONCE:
        return int(len(before) < 2)
    longest = before[-1].max() if before else deadlines.RANK_MEASURES_CALLS
    return int(max(1, min(_CALLS, deadlines.RANK_MEASURES_CALLS // longest)))


def _joined(
    kept: Sequence[Observation],
    measured: Measured,
    here: float,
    routes: Collection[str],
    key: dict[str, Any],
) -> Costs:
    """The costs by what earlier jobs and this one have measured. That is kept, unless the ranks' cores have moved."""
    least = measured.seconds.min(axis=0)
    least = least[np.isfinite(least).all(axis=1)]  # the largest sizes are missing if time ran out
    times = dict(zip(routes, least.T.tolist(), strict=True))
    used = [*kept]
    if len(least) > 1:
        new = Observation(time.time(), here, times)
        if measured.stayed:
            cache.add(_folder(), key, new)
        if measured.stayed or not kept:
            used.append(new)
    if not used:
        return Costs({}, f"not measured: calls of two sizes took longer than {_limit(key):g} s")
    disturbed = measured.cpu_share < LEAST_CPU_SHARE
    counts = f"least of {len(measured.seconds)} rounds of calls of each of {len(least)} sizes"
    share = f"{100 * measured.cpu_share:.0f} %"
    notes = [
        f"measured {_date(time.time())}, in this job: {counts}",
        f"and {_read(kept, key)}" if kept else "",
        "the ranks' cores moved meanwhile, so it is not kept for other jobs"
        * (not measured.stayed),
        f"other programs or ranks left a rank {share} of its core" * disturbed,
    ]
    return replace(_fitted(used, key, "; ".join(filter(None, notes))), disturbed=disturbed)


def _fitted(observations: Sequence[Observation], key: dict[str, Any], origin: str) -> Costs:
    """Lines through the least times."""
    least, sizes = least_of(observations), key["memory"][1:]
    # One line does not fit caches and memory.
    few = max(2, sum(size <= SIZES[-1] for size in sizes))
    lines = {way: fitted(sizes[: len(times)][:few], times[:few]) for way, times in least.items()}
    return Costs(lines, origin, jobs=len(observations), sizes=sizes, seconds=least)


def _folder() -> str:
    """The folder of measurements; a path that is no folder where nothing is kept."""
    return cache_folder() or os.devnull


def _limit(key: dict[str, Any]) -> float:
    one_node = len(key["ranks_of_nodes"]) == 1
    return deadlines.RANK_MEASURES_ON_NODE if one_node else deadlines.RANK_MEASURES_BETWEEN_NODES


def _read(kept: Sequence[Observation], key: dict[str, Any]) -> str:
    """For people: "2026-01-31 12:00 UTC, in 3 earlier jobs, read from ~/.cache/…"."""
    path = cache.path_of(_folder(), key)
    home = os.path.expanduser("~")
    shown = path.replace(home, "~", 1) if path.startswith(f"{home}/") else path
    return f"{_date(kept[-1].when)}, in {len(kept)} earlier jobs, read from {shown}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
