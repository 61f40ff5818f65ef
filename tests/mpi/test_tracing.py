"""Collectives of all ranks on one timeline, whatever their clocks show."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.communicators import reducing
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.errors import CollectiveMismatchError, TopologyError
from mpistrat.trace import merging, of_job
from mpistrat.trace.timeline import Timeline, part_of
from support.rank_errors import errors_of_ranks
from support.trace_rules import slices_of, valid_trace

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="needs 2 MPI ranks or more")
CALLS = 30
SECONDS_LATE = 0.5
HOUR = 3_600_000_000_000


class Traced:
    """A traced communicator over all ranks, each of which has a folder of its own, as on nodes without a shared one."""

    def __init__(self, folder: Path, clock: str, check: str = "always") -> None:
        self.comm = WORLD.Dup()
        self.folder = folder / f"of rank {RANK}"
        self.timeline = Timeline(str(self.folder), RANK, SIZE, "node", clock)
        mpi = MpiTransport(self.comm)
        contract = Contract(mpi, "tests", check=check, timeline=self.timeline)
        self.communicator = Router(Transports(mpi), contract)
        of_job.compare_clocks(self.comm, self.timeline)

    def events(self) -> list[dict]:
        """What rank 0 makes of all parts, on every rank."""
        of_job.compare_clocks(self.comm, self.timeline)
        self.timeline.close()
        of_job.gather_parts(self.comm, self.timeline)
        events = error = None
        if RANK == 0:
            merged = merging.merge(str(self.folder))
            error = "" if merged.is_complete else merged.describe()
            events = valid_trace(self.folder / "trace.json")
        assert self.comm.bcast(error) == ""
        return self.comm.bcast(events)


def errors_told(folder: Path) -> float:
    """By how much the clocks of all ranks may be wrong, in us: after the parts were gathered."""
    largest = 0
    for rank in range(SIZE):
        with open(part_of(str(folder), rank), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.startswith('{"reference"')]
        largest = max([largest, *(line["error"] for line in lines)])
    return largest / 1000


def test_shifted_clocks_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's clock is an hour ahead of that of the rank before it."""
    real = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: real() + RANK * HOUR)
    traced = Traced(tmp_path, clock=f"clock of rank {RANK}")
    value = np.ones(4, np.float32)
    for _ in range(CALLS):
        traced.communicator.all_reduce(value, reducing(label="lined up"))
    events = traced.events()
    wrong = WORLD.bcast(errors_told(traced.folder) if RANK == 0 else None)
    assert wrong < 1_000_000  # a rank may wait for a core, but not for an hour
    calls: dict[int, list[dict]] = {}
    for event in slices_of(events, "all_reduce"):
        calls.setdefault(event["args"]["number"], []).append(event)
    assert len(calls) == CALLS
    for of_ranks in calls.values():
        assert sorted(event["pid"] for event in of_ranks) == list(range(SIZE))
        ends = [event["ts"] + event["dur"] for event in of_ranks]
        # Nobody leaves before the last has entered.
        assert min(ends) > max(event["ts"] for event in of_ranks) - 2 * wrong - 1
        assert max(ends) - min(ends) < 2 * wrong + 10_000_000


@several
def test_a_late_rank_is_named(tmp_path: Path) -> None:
    """The others' waiting is as long as it was late, and shown apart from the moving of bytes."""
    traced = Traced(tmp_path, clock="of all")
    traced.communicator.barrier()
    if RANK == LAST:
        time.sleep(SECONDS_LATE)
    traced.communicator.all_reduce(np.ones((3, 5), np.float64), reducing("max", "late"))
    events = traced.events()
    calls = slices_of(events, "all_reduce")
    (last,) = [event["ts"] for event in calls if event["pid"] == LAST]
    assert {event["args"]["last to enter"] for event in calls} == {f"rank {LAST}"}
    for event in calls:
        assert event["args"]["bytes"] == 3 * 5 * 8
        assert event["args"]["call"] == "all_reduce(max, float64, (3, 5), late)"
        assert event["args"]["at"].split(":")[0] == __file__
        waits = [
            wait["dur"]
            for wait in slices_of(events, "wait for the others")
            if wait["pid"] == event["pid"] and wait["ts"] == event["ts"]
        ]
        assert len(waits) == 1
        if event["pid"] != LAST:
            assert last - event["ts"] - 1 <= waits[0] < event["dur"]  # us, rounded
    moves = [event for event in slices_of(events, "move bytes") if event["pid"] == 0]
    assert len(moves) == 2


def test_every_collective_is_traced(tmp_path: Path) -> None:
    traced = Traced(tmp_path, clock="of all")
    use_all(traced.communicator)
    part = traced.communicator.split(RANK % 2)
    assert part.contract.timeline is traced.timeline
    part.barrier(label="of a part")
    events = traced.events()
    names = {e["name"] for e in events if e.get("cat") == "collective"}
    assert names == {
        "all_reduce",
        "reduce",
        "reduce_scatter",
        "broadcast",
        "all_gather",
        "broadcast_object",
        "all_gather_object",
        "barrier",
        "split",
    }
    assert len(slices_of(events, "barrier")) == 2 * SIZE


def use_all(communicator: Communicator) -> None:
    value = np.ones(SIZE, np.float32)
    communicator.all_reduce(value)
    communicator.reduce(value)
    communicator.reduce_scatter(value, np.empty(1, np.float32))
    communicator.broadcast(value)
    communicator.all_gather(value)
    communicator.broadcast_object("x")
    communicator.all_gather_object("x")
    communicator.barrier()


def test_without_the_agreement_waiting_is_not_told_apart(tmp_path: Path) -> None:
    traced = Traced(tmp_path, clock="of all", check="never")
    traced.communicator.barrier()
    events = traced.events()
    assert len(slices_of(events, "barrier")) == SIZE
    assert slices_of(events, "wait for the others") == []


@several
def test_a_mismatch_is_traced_and_raised(tmp_path: Path) -> None:
    traced = Traced(tmp_path, clock="of all")
    with pytest.raises(CollectiveMismatchError):
        traced.communicator.all_gather_object(RANK, label="the last" if RANK == LAST else "others")
    traced.communicator.barrier()
    events = traced.events()
    assert len(slices_of(events, "all_gather_object")) == SIZE


def test_one_rank_that_cannot_write_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(folder: str, rank: int, size: int) -> Timeline:
        if RANK == LAST:
            raise PermissionError(13, "Permission denied", folder)
        return Timeline(folder, rank, size, "node", "of all")

    monkeypatch.setattr(of_job.of_process, "begin", begin)
    comm = WORLD.Dup()
    folder = str(tmp_path / f"of rank {RANK}")

    for name, message, _ in errors_of_ranks(lambda: of_job.begin(comm, folder)):
        assert name == TopologyError.__name__
        assert f"1 of {SIZE} ranks cannot write" in message
        assert f"rank {LAST} on " in message


def test_nothing_is_traced_without_the_setting() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    assert communicator_for(WORLD).contract.timeline is None
    assert strategy.extended.communicator.contract.timeline is None
    assert not hasattr(ms.Strategy.run, "__wrapped__")
