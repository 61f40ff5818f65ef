"""What is measured, in which time, and what follows from it."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.communicators.costs import measurement as selection
from mpistrat.communicators.costs.measurement import (
    HOST,
    LARGEST,
    SIZES,
    SIZES_ON_DEVICE,
    Costs,
    Memory,
    costs_of,
    measure,
)
from mpistrat.communicators.costs.model import Cost
from mpistrat.communicators.local import LocalCommunicator

ALONE = LocalCommunicator()
FLOOR = 1 << 15
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
    """The median of nine leaves out what some calls take longer."""
    ways = {"slow": clock.spinning(5e-4, 1e-10, 3e-3), "fast": clock.spinning(1e-4, 5e-10, 3e-3)}
    costs = costs_of(ways, ALONE, "", [1])
    assert costs.ways["slow"].alpha == pytest.approx(5e-4)
    assert costs.ways["fast"].beta == pytest.approx(5e-10)
    assert costs.cheaper_from("slow", "fast", FLOOR) == pytest.approx(1e6)


def test_costs_in_a_device_s_memory(clock: Clock) -> None:
    """They are those of larger buffers, which are made there; the host's costs of the same ways are others."""
    made: list[int] = []

    def zeros(length: int) -> np.ndarray:
        made.append(length * 4)
        return np.zeros(length, np.float32)

    device = Memory("a device", SIZES_ON_DEVICE, zeros)
    ways = {"slow": clock.spinning(1e-3, 1e-10), "fast": clock.spinning(1e-4, 3e-10)}
    on_device = costs_of(ways, ALONE, "", [1], memory=device)
    assert made == list(SIZES_ON_DEVICE)
    assert on_device.cheaper_from("slow", "fast", FLOOR) == pytest.approx(4.5e6)
    on_host = costs_of(ways, ALONE, "", [1])
    assert on_host.cheaper_from("slow", "fast", FLOOR) == math.inf
    assert costs_of(ways, ALONE, "", [1], memory=device) is on_device


@pytest.mark.parametrize("seconds", [0.02, 0.2, 0.6])
def test_it_takes_less_than_a_second(clock: Clock, seconds: float) -> None:
    """Also of calls that are very slow: one that has begun ends, and there is no other."""
    costs = costs_of({"one": clock.sleeping(seconds)}, ALONE, "", [1])
    assert clock.now < 1
    assert bool(costs.ways) == (seconds < 0.3)
    if seconds == 0.6:
        assert costs.cheaper_from("one", "another", FLOOR) == selection.UNMEASURED
        assert "not measured: calls of two sizes took longer than 0.3 s" in costs.explain()


def test_a_way_that_sleeps_is_not_disturbed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it should be awake: then somebody else had the core."""
    monkeypatch.setattr(selection, "LEAST_CPU_SHARE", 0.3)  # of 1 and 1/6
    ways = {"asleep": clock.sleeping(5e-3), "awake": clock.spinning(1e-3, 0.0)}
    costs = costs_of(ways, ALONE, "", [1], asleep=["asleep"])
    assert not costs.disturbed
    assert costs.cheaper_from("asleep", "awake", FLOOR) == math.inf
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


def costs(first: Cost, second: Cost, disturbed: bool = False) -> Costs:
    return Costs({"one": first, "other": second}, disturbed=disturbed)


@pytest.mark.parametrize(
    ("known", "smallest"),
    [
        (costs(Cost(20e-6, 0.1e-9), Cost(10e-6, 0.2e-9)), 100_000),
        (costs(Cost(1e-6, 0.1e-9), Cost(10e-6, 0.2e-9)), FLOOR),  # however small, it would win
        (costs(Cost(1e-3, 0.1e-9), Cost(1e-6, 0.56e-9)), LARGEST),  # from 2.2 MB on
        (costs(Cost(1e-5, 0.22e-9), Cost(1e-5, 0.2e-9)), LARGEST),  # dearer, as far as noise goes
        (costs(Cost(1e-5, 0.4e-9), Cost(1e-5, 0.2e-9)), math.inf),
        (costs(Cost(1e-5, 0.4e-9), Cost(1e-5, 0.2e-9), disturbed=True), LARGEST),
        (Costs(), selection.UNMEASURED),
    ],
)
def test_from_which_size_on(known: Costs, smallest: float) -> None:
    assert known.cheaper_from("one", "other", FLOOR) == pytest.approx(smallest, abs=1)


def test_a_file_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same ways, MPI and ranks, in another job; what was disturbed is kept in this job only."""
    monkeypatch.setenv("MPISTRAT_CACHE", str(tmp_path))
    calls: list[int] = []
    ways: dict[str, Any] = {"one": calls.append, "other": lambda buffer: None}

    def anew(mpi: str = "MPI 1", ranks: int = 2) -> tuple[Costs, bool]:
        del calls[:]
        return costs_of(ways, ALONE, mpi, [ranks]), bool(calls)

    first, measured = anew()
    assert measured
    assert anew() == (first, False)  # another communicator
    selection.costs_of_this_job.clear()  # another job
    again, measured = anew()
    assert not measured
    assert again.ways == first.ways
    assert f"read from {tmp_path}" in again.explain()
    assert anew(mpi="MPI 2")[1]
    assert anew(ranks=3)[1]
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(selection, "LEAST_CPU_SHARE", math.inf)  # and now everything does
    assert anew(ranks=4)[0].disturbed
    assert len(list(tmp_path.iterdir())) == 3
    assert not anew(ranks=4)[1]
    selection.costs_of_this_job.clear()
    assert anew(ranks=4)[1]
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert anew()[1]


def test_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPISTRAT_CACHE", "off")
    costs_of({"one": lambda buffer: None}, ALONE, "", [1])
    assert not list(tmp_path.iterdir())
