"""Costs of routes (ways to move bytes): all ranks measure them once together, or read measurements of earlier jobs.

All ranks must choose the same route. So the first rank reads, fits and decides, and sends the costs to the other ranks.
A measured time is the slowest rank's. The costs stay the same while a job runs.
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

# The sizes in bytes that are timed: from the smallest that MPI does not always move, to more than a core's caches hold.
SIZES = (1 << 15, 1 << 17, 1 << 19, 1 << 21)
# Sizes for the memory of a node: as long as caches hold the buffers, a route may win at one size and lose at the next.
SIZES_ON_NODE = tuple(1 << power for power in range(15, 26))
# Sizes for buffers on a device: devices are fast with larger buffers only.
SIZES_ON_DEVICE = (1 << 17, 1 << 19, 1 << 21, 1 << 23)
# Rounds that are timed, after a first round in which pages and connections are still missing.
ROUNDS = 9
# Calls of a route with one buffer in a round, at most; deadlines.RANK_MEASURES_CALLS limits their time.
_CALLS = 8
_ONCE = 1 << 23  # After the first round, a buffer of more bytes is timed in one round only.
# Ranks spin while they wait. If a rank had less of its core, other programs, or ranks without a core, disturbed it.
LEAST_CPU_SHARE = 0.9
# If the ranks ran out of time, they take a route for buffers of at least this many bytes.
UNMEASURED = 1 << 18
# A route that costs more than this many times as much as the other at the largest size is never taken. A cheaper one is
# taken for larger buffers, because they gain by it.
CLEARLY = 1.25

Route = Callable[[Any], object]

# If this process is the first rank: by key, the distance between the ranks' cores, and the costs.
costs_of_this_job: dict[str, tuple[float, Costs]] = {}


@dataclass(frozen=True)
class Costs:
    """The costs of the routes between the ranks of a communicator. They are equal on all ranks.

    Attributes:
        routes: the fitted cost of each route, by name; empty if the ranks ran out of time.
        origin: where the costs come from, as text for people.
        disturbed: whether other programs ran while this job measured; for people.
        jobs: number of jobs that have measured the costs.
        sizes: the measured sizes in bytes, in ascending order.
        seconds: by route, the least time for each size; fewer than `sizes` if the ranks ran out of time.
    """

    routes: Mapping[str, Cost] = field(default_factory=dict)
    origin: str = "not measured yet"
    disturbed: bool = False
    jobs: int = ENOUGH
    sizes: Sequence[int] = SIZES
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def cheaper_from(self, way: str, other: str, floor: int, clearly: float = CLEARLY) -> float:
        """Return the number of bytes from which the route `way` is taken, and not `other`.

        At the latest it is taken from the largest measured size, unless it costs more than `clearly` times as much as
        `other` there. Fewer than ENOUGH jobs do not prove that, because other programs may have disturbed them.

        Args: floor: the least result, in bytes.

        Returns: infinity for never; UNMEASURED, or `floor` if that is larger, without measured costs.
        """
        if not self.routes:
            return max(floor, UNMEASURED)
        this, that, largest = self.routes[way], self.routes[other], self.sizes[-1]
        dearer = this.seconds(largest) > clearly * that.seconds(largest)
        if dearer and self.jobs >= ENOUGH:
            return math.inf
        return max(floor, math.ceil(min(largest, this.cheaper_from(that))))

    def borders(self, way: str, other: str, floor: int) -> list[float]:
        """Return the sizes, in bytes, at which the route changes: to `way` at the first, to `other` at the second, …

        A border lies midway (geometrically) between two measured sizes with different winners. For buffers that were
        too large to be timed, the fitted lines decide. Fewer than ENOUGH jobs do not prove that `way` is dearer after
        the largest size.

        Args: floor: the least border, in bytes.
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
        """Return a line of text for each route, and a line that says where the costs come from."""
        lines = [f"    {way}: {cost}" for way, cost in self.routes.items()]
        return "\n".join([*lines, f"    {self.origin}"])

    def explain_from(self, *borders: float) -> str:
        """Return text for people: the sizes for which a route is taken, and the costs.

        Args: borders: the sizes at which the route is taken, left, taken again, and so on; infinity for never.
        """
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
    """The memory in which the buffers for measurements lie.

    Attributes:
        name: distinguishes the costs of different memory: "NVIDIA H100".
        sizes: the sizes of buffers to time, in bytes.
        zeros: makes an array of that many float32 zeros in this memory.
    """

    name: str
    sizes: Sequence[int]
    zeros: Callable[[int], Any]


def written(length: int) -> np.ndarray:
    """Return `length` float32 zeros in pages that are written, as a program's are: unwritten pages are all one page."""
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
    """Return the costs of all-reduces by `routes`. Collective over `communicator`; it takes less than half a second.

    Args:
        routes: by name, a function of an array of zeros in `memory`. It combines the arrays of all ranks in place, and
            returns when that is done.
        mpi: the library's name and version.
        ranks_of_nodes: number of ranks on each node; the same on all ranks.
        abreast: number of such communicators over the same nodes that measure at the same time.
        asleep: names of the routes that leave the core to other threads while they wait.
        memory: where the buffers lie.
        distance: measures the distance between the ranks' cores, in seconds; costs at another distance are not used.
            By default it is 0.
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
    """Return the costs at about the distance `here` that this job, or enough earlier jobs, have measured; else None."""
    there, costs = costs_of_this_job.get(repr(key), (math.inf, None))
    if costs is not None and are_near(here, there):
        return costs
    return _fitted(kept, key, f"measured {_read(kept, key)}") if suffice(kept) else None


def _kept(key: dict[str, Any], here: float) -> list[Observation]:
    """Return the observations of earlier jobs at about the distance `here`, the newest last."""
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
        seconds: the slowest rank's times, of shape [rounds, sizes, routes]; fewer sizes if the ranks ran out of time.
        cpu_share: the part of the time (0 to 1) in which a rank had its core, in routes that wait awake; the smallest
            of all ranks.
        stayed: whether the distance between the ranks' cores was as expected.
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
    """Time ROUNDS rounds of all routes and buffers. Collective.

    In a round the routes take turns, in opposite order in every second round, so that other programs disturb all of
    them alike.

    Args:
        seconds: the ranks stop earlier if the slowest rank needs more than this.
        asleep: names of the routes that leave the core while they wait.
        distance: measures the distance between the ranks' cores, in seconds.
        here: the distance that is expected.
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
    """Return the seconds of a call, and the seconds of CPU time of this thread in it. Collective."""
    if isinstance(buffer, np.ndarray):
        buffer[...] = 0  # a program, too, has just written the values that it combines
    communicator.barrier()
    began, ran_before = time.perf_counter(), time.thread_time()
    route(buffer)
    return time.perf_counter() - began, time.thread_time() - ran_before


def _times_of(rounds: Sequence[Sequence[np.ndarray]], sizes: int) -> np.ndarray:
    """Return the array of `Measured.seconds`.

    It has the complete rounds after the first. If there is none, it has one round: the second as far as it went, and
    the sizes after that from the first.
    """
    first, *later = rounds
    whole = [times for times in later if len(times) == sizes]
    warm = [*itertools.chain(*later[:1])]
    return np.array(whole or [[*warm, *first[len(warm) :]]])


def _calls(nbytes: int, before: Sequence[np.ndarray]) -> int:
    """Return how often each route is called with a buffer of `nbytes` in a round.

    Args: before: for each earlier round, the seconds of each route for this buffer.
    """
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
    """Return the costs from the observations of earlier jobs and of this one.

    It also keeps this job's observation for later jobs, unless the ranks' cores have moved.

    Args:
        kept: the observations of earlier jobs.
        here: the distance between the ranks' cores, in seconds.

    Returns: costs without routes if nothing is kept and the ranks had no time for two sizes.
    """
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
        "the ranks' cores moved meanwhile, so the times are not kept for other jobs"
        * (not measured.stayed),
        f"other programs or ranks left a rank {share} of its core" * disturbed,
    ]
    return replace(_fitted(used, key, "; ".join(filter(None, notes))), disturbed=disturbed)


def _fitted(observations: Sequence[Observation], key: dict[str, Any], origin: str) -> Costs:
    """Return the costs by lines through the least times of `observations`."""
    least, sizes = least_of(observations), key["memory"][1:]
    # One line cannot fit both times in the caches and times in memory.
    few = max(2, sum(size <= SIZES[-1] for size in sizes))
    lines = {way: fitted(sizes[: len(times)][:few], times[:few]) for way, times in least.items()}
    return Costs(lines, origin, jobs=len(observations), sizes=sizes, seconds=least)


def _folder() -> str:
    """Return the folder of measurements; where nothing is kept, a path that is no folder."""
    return cache_folder() or os.devnull


def _limit(key: dict[str, Any]) -> float:
    one_node = len(key["ranks_of_nodes"]) == 1
    return deadlines.RANK_MEASURES_ON_NODE if one_node else deadlines.RANK_MEASURES_BETWEEN_NODES


def _read(kept: Sequence[Observation], key: dict[str, Any]) -> str:
    """Return text for people: "2026-01-31 12:00 UTC, in 3 earlier jobs, read from ~/.cache/…"."""
    path = cache.path_of(_folder(), key)
    home = os.path.expanduser("~")
    shown = path.replace(home, "~", 1) if path.startswith(f"{home}/") else path
    return f"{_date(kept[-1].when)}, in {len(kept)} earlier jobs, read from {shown}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
