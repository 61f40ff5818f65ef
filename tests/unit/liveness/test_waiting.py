"""When a rank stops waiting for others."""

import time

import pytest

from mpistrat.errors import StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.deadlines import OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT
from mpistrat.liveness.records.record import (
    ABORT,
    ENTRY,
    RAISE,
    STALLED,
    RankRecord,
)
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until
from support.job_records import new_record


def test_waiting_ends_with_a_reported_stall() -> None:
    watch = CommunicatorWatch(new_record(None))
    watch.record.words[ABORT] = RAISE
    with pytest.raises(StallError, match="rank 0 waited too long"):
        wait_until(lambda: False, watch)


def test_a_stall_of_another_communicator_is_not_raised() -> None:
    watch = CommunicatorWatch(new_record(None))
    watch.record.words[STALLED] = 7
    watch.record.words[ABORT] = RAISE
    ends = time.monotonic() + 0.1
    wait_until(lambda: time.monotonic() > ends, watch)


def test_waiting_has_a_limit_where_nobody_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "RANK_WAITS_FOR_LOOK_OF_OBSERVER", 0.1)
    record = RankRecord(None)
    record.start(1, 2, "node7", 0.2, 1)
    with pytest.raises(
        StallError, match=r"rank 1 waited (0\.[3-9]|[1-9]\d*\.\d) s .* no observer runs"
    ):
        wait_until(lambda: False, CommunicatorWatch(record, crowded=True))


@pytest.mark.parametrize(
    ("limit", "is_set", "timeout", "expected"),
    [
        (60, False, 0, 60),
        (60, False, 1800, 1800 + OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT),
        (60, False, 5, 5 + OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT),
        (60, True, 1800, 60),
        (0, True, 0, 0),
        (0, True, 1800, 1800 + OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT),
    ],
)
def test_the_limit_of_a_group_with_a_timeout(
    limit: float, is_set: bool, timeout: float, expected: float
) -> None:
    """What the user has set goes before a timeout, and that before the default."""
    record = RankRecord(None)
    record.start(1, 2, "node7", limit, limit_is_set=is_set)
    watch = CommunicatorWatch(record)
    watch.timeout = timeout
    (slot,) = record.slots()
    assert watch.timeout == slot.timeout == timeout
    assert record.limit_of(slot.timeout) == expected


def test_a_timeout_waits_for_the_observer() -> None:
    """Until that has said who is missing, as long as it looks."""
    watch = CommunicatorWatch(new_record(None))
    watch.timeout = 0.05
    record = watch.record
    record.enter(watch.slot, 1, b"", 0)
    record.looked = time.monotonic_ns()
    began = time.monotonic()

    def arrived() -> bool:
        if time.monotonic() - began > 0.3:
            record.noticed = record.words[watch.slot + ENTRY]
        return False

    with pytest.raises(StallError, match=r"rank 0 waited 0\.[3-9] s .* timeout of its group is"):
        wait_until(arrived, watch)
    with pytest.raises(StallError, match=r"rank 0 waited 0\.[0-2] s"):
        wait_until(lambda: False, watch)
