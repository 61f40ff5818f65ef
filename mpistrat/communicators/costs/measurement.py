"""Costs of routes (ways to move bytes): the ranks measure them together, or read measurements of earlier jobs.

All ranks must choose the same route, so rank 0 reads and fits the times, and sends the costs to the other ranks. Each
time is in seconds, and of the slowest rank. The costs stay the same while a job runs.
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

# The sizes in bytes that are timed: from the smallest that another route may move faster than MPI, to more than a
# core's caches.
SIZES = (1 << 15, 1 << 17, 1 << 19, 1 << 21)
# Sizes for the memory of a node: as long as caches hold the buffers, a route may win at one size and lose at the next.
SIZES_ON_NODE = tuple(1 << power for power in range(15, 26))
# Sizes for buffers on a device: devices are fast with larger buffers only.
SIZES_ON_DEVICE = (1 << 17, 1 << 19, 1 << 21, 1 << 23)
# Rounds that are timed, after a first round that does not count, because it makes pages and opens connections.
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

# On rank 0 of a communicator, by key: the distance in seconds between the ranks' cores, and the costs.
costs_of_this_job: dict[str, tuple[float, Costs]] = {}


@dataclass(frozen=True)
class Costs:
    """The costs of the routes between the ranks of a communicator. They are equal on all ranks.

    Attributes:
        routes: from a route's name to its fitted cost; empty if the ranks ran out of time.
        origin: when, and by how many jobs, the costs were measured, as text for people.
        disturbed: whether a rank lacked a core for part of this job's measurement.
        jobs: number of jobs that have measured the costs.
        sizes: the measured sizes in bytes, in ascending order.
        seconds: from a route's name to its times in seconds, the least of all rounds and jobs for each size; fewer than
            `sizes` if the ranks ran out of time.
    """

    routes: Mapping[str, Cost] = field(default_factory=dict)
    origin: str = "not measured yet"
    disturbed: bool = False
    jobs: int = ENOUGH
    sizes: Sequence[int] = SIZES
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def cheaper_from(self, way: str, other: str, floor: int, clearly: float = CLEARLY) -> float:
        """Return the number of bytes from which the route `way` is taken in place of `other`.

        The fitted lines cross there; it is at most the largest measured size.

        Args: floor: the least result, in bytes.

        Returns: infinity (`way` is never taken) if at least ENOUGH jobs measured, and `way` took more than `clearly`
            times as long as `other` at the largest size. Without measured costs, UNMEASURED, or `floor` if larger.
        """
        if not self.routes:
            return max(floor, UNMEASURED)
        this = self.routes[way]
        that = self.routes[other]
        largest = self.sizes[-1]
        dearer = this.seconds(largest) > clearly * that.seconds(largest)
        if dearer and self.jobs >= ENOUGH:
            return math.inf
        crossing = min(largest, this.cheaper_from(that))
        return max(floor, math.ceil(crossing))

    def borders(self, way: str, other: str, floor: int) -> list[float]:
        """Return the sizes, in bytes, where the route changes: to `way` at the first, to `other` at the second, …

        A border is the geometric mean of two neighbouring measured sizes with different faster routes. If the largest
        sizes were not timed, the fitted lines decide there. While fewer than ENOUGH jobs have measured, `way` is taken
        after the largest size, so that a disturbed measurement cannot exclude it.

        Args: floor: the least border, in bytes.

        Returns: ascending sizes; [] if `way` is never taken. Without measured costs, [UNMEASURED] or [`floor`],
            whichever is larger.
        """
        if not self.routes:
            return [max(floor, UNMEASURED)]
        found: list[float] = []
        smaller = 0
        times = self.seconds[way], self.seconds[other]
        for size, this, that in zip(self.sizes, *times, strict=False):
            if (this <= that) == (len(found) % 2 == 0):
                border = math.sqrt(smaller * size)
                found.append(max(floor, border))
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
        """Return text for people: the sizes for a route, and the costs.

        Args: borders: sizes in bytes: from the first on the route is taken, from the second on not, and so on;
            infinity or no border: never.
        """
        if self is NOT_MEASURED:
            return "once something large has been combined"
        starts = [f"from {border:.0f}" for border in borders[::2] if border < math.inf]
        ends = [f"to {border:.0f} bytes" for border in borders[1::2]]
        pairs = itertools.zip_longest(starts, ends, fillvalue="bytes on")
        ranges = " and ".join(f"{start} {end}" for start, end in pairs)
        return f"{ranges or 'never'}; of S bytes an all-reduce takes\n{self.explain()}"


NOT_MEASURED = Costs()


@dataclass(frozen=True)
class BufferMemory:
    """The memory of the buffers for measurements.

    Attributes:
        name: distinguishes the costs of different memory: "NVIDIA H100".
        sizes: the sizes of buffers to time, in bytes.
        zeros: a function of a length; it returns an array of that many float32 zeros in this memory.
    """

    name: str
    sizes: Sequence[int]
    zeros: Callable[[int], Any]


def written(length: int) -> np.ndarray:
    """Return `length` float32 zeros, and write them: the kernel maps all unwritten pages to one page of zeros."""
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
    """Return the costs of all-reduces by `routes`, equal on all ranks. Collective; it takes less than half a second.

    The costs come from this job's earlier call, from enough earlier jobs, or from a measurement now.

    Called by: transports, at their first large buffer.

    Args:
        routes: from a name to a function of an array of zeros in `memory`. The function sums the arrays of all ranks in
            place, and returns when the sum is complete.
        mpi: the MPI library's name and version; measurements of another library are not used.
        ranks_of_nodes: number of ranks on each node; the same on all ranks.
        abreast: number of such communicators over the same nodes that measure at the same time.
        asleep: names of the routes that sleep while they wait; their CPU time says nothing about other programs.
        memory: the memory of the buffers.
        distance: measures the distance between the ranks' cores, as seconds of a copy; costs at another distance are
            not used. By default it is 0.
    """
    cpus = os.sched_getaffinity(0)
    cores = (cpu_model(), len(cpus), network_links())
    cores_of_ranks, caches_of_ranks, distances = zip(
        *communicator.all_gather_object((cores, caches_of(cpus), distance())), strict=True
    )
    here = max(distances)
    nodes = Counter(cores_of_ranks)
    caches: Counter[str] = Counter()
    for names in caches_of_ranks:
        caches.update(names)
    key = {
        "ways": sorted(routes),
        "mpi": mpi,
        "settings": transport_settings(),
        "ranks_of_nodes": sorted(ranks_of_nodes),
        "abreast": abreast,
        "memory": [memory.name, *memory.sizes],
        "nodes": sorted([*cores, ranks] for cores, ranks in nodes.items()),
        "caches": sorted([name.split()[0], ranks] for name, ranks in caches.items()),
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
    """Return the costs that this job, or enough earlier jobs, measured at about the distance `here`.

    Returns: None if the ranks must measure. Only rank 0's result counts.
    """
    there, costs = costs_of_this_job.get(repr(key), (math.inf, None))
    if costs is not None and are_near(here, there):
        return costs
    if suffice(kept):
        return _fitted(kept, key, f"measured {_read(kept, key)}")
    return None


def _kept(key: dict[str, Any], here: float) -> list[Observation]:
    """Return the measurements of earlier jobs that fit `key`, at about the distance `here`, the newest last."""
    most_sizes = len(key["memory"]) - 1
    return [
        observation
        for observation in cache.read(_folder(), key)
        if are_near(observation.distance, here)
        and observation.seconds.keys() == set(key["ways"])
        and all(1 < len(times) <= most_sizes for times in observation.seconds.values())
    ]


class Measured(NamedTuple):
    """The result of `measure`, equal on all ranks.

    Attributes:
        seconds: times of the slowest rank, in seconds, the least of a round's calls; of shape [rounds, sizes, routes],
            with fewer sizes if the ranks ran out of time.
        cpu_share: a rank's CPU time divided by its elapsed time in routes that wait awake (about 0 to 1); the smallest
            of all ranks.
        stayed: whether the distance between the ranks' cores, the median of all rounds, was about as expected.
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
    """Time each route with each buffer, in ROUNDS rounds after a first one. Collective.

    A round calls all routes with a buffer, then with the next buffer. Every second round calls the routes in opposite
    order, so that other programs disturb all routes alike. Each time is the slowest rank's, in seconds.

    Args:
        routes: from a name to a function that all-reduces an array.
        buffers: arrays of ascending size; they are overwritten.
        seconds: the ranks stop when the slowest rank has spent this much time.
        asleep: names of the routes that sleep while they wait; they do not count in `cpu_share`.
        distance: measures the distance between the ranks' cores, in seconds.
        here: the expected distance, in seconds; `Measured.stayed` compares the measured distance with it.
    """
    rounds: list[list[np.ndarray]] = []
    started = time.perf_counter()
    spent = awake = ran = 0.0
    distances = []
    for number in range(1 + ROUNDS):
        turns = list(enumerate(routes.items()))[:: (-1) ** number]
        least: list[np.ndarray] = []
        rounds.append(least)
        for size, buffer in enumerate(buffers):
            before = [earlier[size] for earlier in rounds[:-1]]
            calls = _calls(buffer.nbytes, before)
            took = np.empty((calls, len(routes)))
            for (i, (name, route)), call in itertools.product(turns, range(calls)):
                took[call, i], on_core = _timed(route, buffer, communicator)
                if name not in asleep:
                    awake += took[call, i]
                    ran += on_core
            apart = distance()
            elapsed = time.perf_counter() - started
            slowest = np.append(took, [apart, elapsed])
            communicator.all_reduce(slowest, "max")
            times = slowest[:-2].reshape(took.shape)
            least.append(times.min(axis=0, initial=math.inf))
            distances.append(slowest[-2])
            spent = slowest[-1]
            if spent >= seconds:
                break
        if spent >= seconds:
            break
    share = np.array(ran / awake if awake else 1.0)
    communicator.all_reduce(share, "min")
    stayed = are_near(here, float(np.median(distances)))
    return Measured(_times_of(rounds, len(buffers)), float(share), stayed)


def _timed(route: Route, buffer: Any, communicator: Communicator) -> tuple[float, float]:
    """Return the seconds that a call takes on this rank after a barrier, and this thread's CPU seconds in it."""
    if isinstance(buffer, np.ndarray):
        buffer[...] = 0  # a program, too, has just written the values that it combines
    communicator.barrier()
    began = time.perf_counter()
    ran_before = time.thread_time()
    route(buffer)
    elapsed = time.perf_counter() - began
    ran = time.thread_time() - ran_before
    return elapsed, ran


def _times_of(rounds: Sequence[Sequence[np.ndarray]], sizes: int) -> np.ndarray:
    """Return the times of all complete rounds after the first, of shape [rounds, sizes, routes].

    If no such round is complete, return one round: the times of the second round, and for the sizes that it did not
    reach, of the first.

    Args:
        rounds: for each round and size, an array with a time for each route; infinity for a route that was not called.
            Where time ran out, the last round lacks the larger sizes.
        sizes: number of buffers.
    """
    first, *later = rounds
    whole = [times for times in later if len(times) == sizes]
    if whole:
        return np.array(whole)
    warm = later[0] if later else []
    cold = first[len(warm) :]
    return np.array([[*warm, *cold]])


def _calls(nbytes: int, before: Sequence[np.ndarray]) -> int:
    """Return how often a round calls each route with a buffer of `nbytes`: 1 to _CALLS; 0: the buffer needs no more.

    Args: before: for each earlier round, an array with each route's seconds for this buffer.
    """
    if nbytes > _ONCE:
        return int(len(before) < 2)
    if not before:
        return 1
    longest = before[-1].max()
    fitting = deadlines.RANK_MEASURES_CALLS // longest
    return int(max(1, min(_CALLS, fitting)))


def _joined(
    kept: Sequence[Observation],
    measured: Measured,
    here: float,
    routes: Collection[str],
    key: dict[str, Any],
) -> Costs:
    """Return the costs from the measurements of earlier jobs and of this job; on rank 0.

    It also adds this job's measurement to the file for later jobs, unless the ranks' cores moved meanwhile.

    Args:
        kept: the measurements of earlier jobs.
        measured: the measurement of this job.
        here: the distance between the ranks' cores, in seconds.

    Returns: costs without routes if `kept` is empty and the ranks had no time for two sizes.
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
    origin = f"measured {_date(time.time())}, in this job: {counts}"
    if kept:
        origin += f"; and {_read(kept, key)}"
    if not measured.stayed:
        origin += "; the ranks' cores moved meanwhile, so the times are not kept for other jobs"
    if disturbed:
        percent = 100 * measured.cpu_share
        origin += f"; other programs or ranks left a rank {percent:.0f} % of its core"
    costs = _fitted(used, key, origin)
    return replace(costs, disturbed=disturbed)


def _fitted(observations: Sequence[Observation], key: dict[str, Any], origin: str) -> Costs:
    """Return the costs: for each route, a line fitted to the least time that any job measured at each size."""
    least = least_of(observations)
    sizes = key["memory"][1:]
    # One line cannot fit both times in the caches and times in memory.
    in_caches = sum(size <= SIZES[-1] for size in sizes)
    few = max(2, in_caches)
    lines: dict[str, Cost] = {}
    for way, times in least.items():
        most = min(few, len(times))
        lines[way] = fitted(sizes[:most], times[:most])
    return Costs(lines, origin, jobs=len(observations), sizes=sizes, seconds=least)


def _folder() -> str:
    """Return the folder of measurements; /dev/null, where no file can be made, if the user wants none kept."""
    return cache_folder() or os.devnull


def _limit(key: dict[str, Any]) -> float:
    if len(key["ranks_of_nodes"]) == 1:
        return deadlines.RANK_MEASURES_ON_NODE
    return deadlines.RANK_MEASURES_BETWEEN_NODES


def _read(kept: Sequence[Observation], key: dict[str, Any]) -> str:
    """Return text on the earlier jobs, for people: "2026-01-31 12:00 UTC, in 3 earlier jobs, read from ~/.cache/…"."""
    path = cache.path_of(_folder(), key)
    home = os.path.expanduser("~")
    if path.startswith(f"{home}/"):
        path = path.replace(home, "~", 1)
    return f"{_date(kept[-1].when)}, in {len(kept)} earlier jobs, read from {path}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
