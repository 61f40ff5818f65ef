"""What is measured, in which time, and what follows from it."""

import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.communicators.costs import measurement as selection
from mpistrat.communicators.costs import observations
from mpistrat.communicators.costs.measurement import (
    HOST,
    SIZES,
    SIZES_ON_DEVICE,
    BufferMemory,
    Costs,
    costs_of,
    measure,
)
from mpistrat.communicators.costs.model import Cost
from mpistrat.communicators.local import LocalCommunicator

ALONE = LocalCommunicator()
FLOOR, LARGEST = 1 << 15, SIZES[-1]
BUFFERS = [HOST.zeros(nbytes // 4) for nbytes in SIZES]


@pytest.fixture(autouse=True)
def of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "costs_of_this_job", {})
    monkeypatch.setattr(selection, "LEAST_CPU_SHARE", 0.0)  # what runs beside tests is not theirs


class Clock:
    """Seconds that pass in the ways only, however busy the machine is."""

    def __init__(self) -> None:
        self.now = self.ran = 0.0

    def sleeping(self, seconds: float) -> Any:
        def way(buffer: np.ndarray) -> None:
            self.now += seconds

        return way

    def spinning(self, alpha: float, beta: float, disturbed: float = 0.0) -> Any:
        """A way of that cost, of which each fifth call takes longer."""
        calls = itertools.count()

        def way(buffer: np.ndarray) -> None:
            seconds = alpha + beta * buffer.nbytes
            self.ran += seconds
            self.now += seconds + (0.0 if next(calls) % 5 else disturbed)

        return way


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "thread_time", lambda: clock.ran)
    return clock


def test_costs_are_measured(clock: Clock) -> None:
    """The least of nine leaves out what some calls take longer."""
    ways = {"slow": clock.spinning(5e-4, 1e-10, 3e-3), "fast": clock.spinning(1e-4, 5e-10, 3e-3)}
    costs = costs_of(ways, ALONE, "", [1])
    assert costs.routes["slow"].alpha == pytest.approx(5e-4)
    assert costs.routes["fast"].beta == pytest.approx(5e-10)
    assert costs.cheaper_from("slow", "fast", FLOOR) == pytest.approx(1e6)


def test_costs_in_a_device_s_memory(clock: Clock) -> None:
    """They are those of larger buffers, which are made there; the host's costs of the same ways are others."""
    made: list[int] = []

    def zeros(length: int) -> np.ndarray:
        made.append(length * 4)
        return np.zeros(length, np.float32)

    device = BufferMemory("a device", SIZES_ON_DEVICE, zeros)
    ways = {"slow": clock.spinning(1e-3, 1e-10), "fast": clock.spinning(1e-4, 3e-10)}
    on_device = costs_of(ways, ALONE, "", [1], memory=device)
    assert made == list(SIZES_ON_DEVICE)
    assert on_device.cheaper_from("slow", "fast", FLOOR) == pytest.approx(4.5e6)
    on_host = costs_of(ways, ALONE, "", [1])
    assert replace(on_host, jobs=3).cheaper_from("slow", "fast", FLOOR) == math.inf
    assert costs_of(ways, ALONE, "", [1], memory=device) is on_device


@pytest.mark.parametrize("seconds", [0.02, 0.2, 0.6])
def test_it_takes_less_than_a_second(clock: Clock, seconds: float) -> None:
    """Also of calls that are very slow: one that has begun ends, and there is no other."""
    costs = costs_of({"one": clock.sleeping(seconds)}, ALONE, "", [1])
    assert clock.now < 1
    assert bool(costs.routes) == (seconds < 0.3)
    if seconds == 0.6:
        assert costs.cheaper_from("one", "another", FLOOR) == selection.UNMEASURED
        assert "not measured: calls of two sizes took longer than 0.3 s" in costs.explain()


def test_a_way_that_sleeps_is_not_disturbed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it should be awake: then somebody else had the core."""
    monkeypatch.setattr(selection, "LEAST_CPU_SHARE", 0.3)  # of 1 and 1/6
    ways = {"asleep": clock.sleeping(5e-3), "awake": clock.spinning(1e-3, 0.0)}
    costs = costs_of(ways, ALONE, "", [1], asleep=["asleep"])
    assert not costs.disturbed
    assert replace(costs, jobs=3).cheaper_from("asleep", "awake", FLOOR) == math.inf
    monkeypatch.setattr(selection, "costs_of_this_job", {})
    assert costs_of(ways, ALONE, "", [1]).disturbed


def test_how_much_dearer_is_clearly_so() -> None:
    """Of what is larger than all that was measured."""
    costs = Costs({"one": Cost(0.0, 1.2e-9), "other": Cost(0.0, 1e-9)})
    assert costs.cheaper_from("one", "other", FLOOR) == LARGEST
    assert costs.cheaper_from("one", "other", FLOOR, 1.1) == math.inf


def test_no_home_is_named(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What explain() says goes into results, which others read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MPISTRAT_CACHE", str(tmp_path / "cache"))
    for _ in range(3):
        costs_of({"one": clock.spinning(1e-4, 0.0)}, ALONE, "", [1])
        selection.costs_of_this_job.clear()
    explained = costs_of({"one": clock.spinning(1e-4, 0.0)}, ALONE, "", [1]).explain()
    assert "read from ~/cache/costs-" in explained
    assert str(tmp_path) not in explained


def test_rounds_are_whole(clock: Clock) -> None:
    """What time runs out in is not counted, unless there is nothing else."""
    taken: list[int] = []
    sleeps = clock.sleeping(0.02)
    measured = measure(
        {"one": lambda b: (taken.append(b.nbytes), sleeps(b))}, BUFFERS, ALONE, 0.195
    )
    assert taken == [*SIZES, *SIZES, *SIZES[:2]]
    assert measured.seconds.shape == (1, len(SIZES), 1)
    assert measured.cpu_share == 0
    cut = measure({"one": sleeps}, BUFFERS, ALONE, 0.03)
    assert cut.seconds.shape == (1, 2, 1)


def costs(first: Cost, second: Cost, jobs: int = 3) -> Costs:
    return Costs({"one": first, "other": second}, jobs=jobs)


@pytest.mark.parametrize(
    ("known", "smallest"),
    [
        (costs(Cost(20e-6, 0.1e-9), Cost(10e-6, 0.2e-9)), 100_000),
        (costs(Cost(1e-6, 0.1e-9), Cost(10e-6, 0.2e-9)), FLOOR),  # however small, it would win
        (costs(Cost(1e-3, 0.1e-9), Cost(1e-6, 0.56e-9)), LARGEST),  # from 2.2 MB on
        (costs(Cost(1e-5, 0.22e-9), Cost(1e-5, 0.2e-9)), LARGEST),  # dearer, as far as noise goes
        (costs(Cost(1e-5, 0.4e-9), Cost(1e-5, 0.2e-9)), math.inf),
        (costs(Cost(1e-5, 0.4e-9), Cost(1e-5, 0.2e-9), jobs=2), LARGEST),
        (Costs(), selection.UNMEASURED),
    ],
)
def test_from_which_size_on(known: Costs, smallest: float) -> None:
    assert known.cheaper_from("one", "other", FLOOR) == pytest.approx(smallest, abs=1)


def test_a_file_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same ways, MPI, ranks and caches that their cores share, in other jobs, once three have measured."""
    monkeypatch.setenv("MPISTRAT_CACHE", str(tmp_path))
    monkeypatch.setattr(observations, "CLEARLY_FASTER", 0.0)  # the clock is real
    calls: list[int] = []
    ways: dict[str, Any] = {"one": calls.append, "other": lambda buffer: None}

    def anew(mpi: str = "MPI 1", ranks: int = 2) -> tuple[Costs, bool]:
        del calls[:]
        return costs_of(ways, ALONE, mpi, [ranks]), bool(calls)

    for _ in range(3):
        selection.costs_of_this_job.clear()  # another job
        first, measured = anew()
        assert measured
        assert anew() == (first, False)  # another communicator
    selection.costs_of_this_job.clear()
    again, measured = anew()
    assert not measured
    assert again.routes == first.routes
    assert f"in 3 earlier jobs, read from {tmp_path}" in again.explain()
    assert anew(mpi="MPI 2")[1]
    assert anew(ranks=3)[1]
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(selection, "LEAST_CPU_SHARE", math.inf)  # and now everything does
    assert anew(ranks=4)[0].disturbed
    assert not anew(ranks=4)[1]
    for caches in (("3 0000000f",), ("2 00000001", "3 0000000f")):
        monkeypatch.setattr(selection, "caches_of", lambda cpus, caches=caches: caches)
        assert anew()[1]
        assert not anew()[1]
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert anew()[1]


@dataclass
class Jobs:
    """Jobs one after the other, with one cache."""

    clock: Clock
    distance: float = 3e-6

    def run(self, memory: float = 1.0, mpi: float = 1.0, moved: float = 1.0) -> Costs:
        """What a job finds: from 512 KB on memory costs less than MPI.

        Args:
            memory, mpi: how many times as long as alone the ways take.
            moved: the distance changes so, after the first look at it.
        """
        selection.costs_of_this_job.clear()
        distances = itertools.chain([self.distance], itertools.repeat(self.distance * moved))
        ways = {
            "memory": self.clock.spinning(75e-6 * memory, 1e-10 * memory),
            "MPI": self.clock.spinning(25e-6 * mpi, 2e-10 * mpi),
        }
        return costs_of(ways, ALONE, "MPI 1", [2], distance=lambda: next(distances))


@pytest.fixture
def jobs(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setenv("MPISTRAT_CACHE", str(tmp_path))
    return Jobs(clock)


def choices(costs: Costs) -> tuple[float, list[float]]:
    ways = "memory", "MPI", FLOOR
    return costs.cheaper_from(*ways), costs.borders(*ways)


QUIET = pytest.approx(5e5, abs=1), [1 << 18]


@pytest.mark.parametrize(
    "disturbed", [[(1, 1), (9, 1), (1, 1)], [(1, 1), (9, 1), (1, 9)], [(9, 1), (9, 2), (1, 1)]]
)
def test_one_quiet_job_of_three_decides(
    jobs: Jobs, disturbed: list[tuple[float, float]], tmp_path: Path
) -> None:
    """In any order."""
    for order in itertools.permutations(disturbed):
        for memory, mpi in order:
            last = jobs.run(memory, mpi)
        assert choices(last) == QUIET
        assert last.jobs == 3
        for file in tmp_path.iterdir():
            file.unlink()


def test_never_needs_three_jobs(jobs: Jobs) -> None:
    """Before, the largest size that is measured is the border."""
    found = [choices(jobs.run(memory=9)) for _ in range(3)]
    assert found == [(LARGEST, [LARGEST]), (LARGEST, [LARGEST]), (math.inf, [])]


def test_jobs_measure_as_long_as_they_learn(jobs: Jobs) -> None:
    """Three at least, and five at most."""
    for slower in (9.0, 7.0, 5.0, 3.0, 1.0, 0.5):
        costs = jobs.run(slower, slower)
        assert costs.routes["MPI"].alpha == pytest.approx(25e-6 * max(1.0, slower))
    assert costs.jobs == 5
    jobs.distance *= 2
    assert [jobs.run().jobs for _ in range(5)] == [1, 2, 3, 3, 3]


def test_the_distance_chooses(jobs: Jobs) -> None:
    """Costs at another distance are another matter; those at about the same are not."""
    near = [jobs.run() for _ in range(3)][-1]
    jobs.distance *= 2
    far = [jobs.run(memory=9) for _ in range(3)][-1]
    assert choices(far) != choices(near)
    for distance, known in ((3.3e-6, near), (6.6e-6, far), (2.7e-6, near)):
        jobs.distance = distance
        found = jobs.run(memory=1e3)
        assert "in this job" not in found.origin
        assert choices(found) == choices(known)


def test_cores_that_move_while_a_job_measures(jobs: Jobs, tmp_path: Path) -> None:
    """What it measures is not kept, and not used where there is something better."""
    moved = jobs.run(memory=9, moved=2)
    assert "moved meanwhile" in moved.origin
    assert not list(tmp_path.iterdir())
    assert jobs.run(moved=1.2).jobs == 1
    assert choices(jobs.run(memory=1, mpi=0.1, moved=0.5)) == QUIET
    assert jobs.run().jobs == 2


def test_a_way_that_wins_here_and_there() -> None:
    """At sizes between two that are measured, the way of the nearer one is taken."""
    times = {"one": [1.0, 3.0, 3.0, 5.0], "other": [2.0, 2.0, 4.0, 4.0]}
    known = Costs({"one": Cost(0, 1), "other": Cost(0, 1)}, sizes=SIZES, seconds=times)
    assert known.borders("one", "other", FLOOR) == [FLOOR, 1 << 16, 1 << 18, 1 << 20]
    assert known.borders("other", "one", FLOOR) == [1 << 16, 1 << 18, 1 << 20]
    few = replace(known, jobs=2)
    assert few.borders("one", "other", FLOOR)[-1] == LARGEST
    assert Costs().borders("one", "other", FLOOR) == [selection.UNMEASURED]
    words = "from 65536 to 262144 bytes and from 1048576 bytes on; of S bytes"
    assert known.explain_from(1 << 16, 1 << 18, 1 << 20).startswith(words)


def test_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPISTRAT_CACHE", "off")
    costs_of({"one": lambda buffer: None}, ALONE, "", [1])
    assert not list(tmp_path.iterdir())
