"""When a rank stops waiting for others."""

import time

import pytest

from mpistrat.errors import StallError
from mpistrat.liveness.record import (
    ABORT,
    RAISE,
    STALLED,
    RankRecord,
)
from mpistrat.liveness.waiting import wait_until
from mpistrat.liveness.watch import CommunicatorWatch
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
    monkeypatch.setattr("mpistrat.liveness.waiting.SECONDS_FOR_THE_OBSERVER", 0.1)
    record = RankRecord(None)
    record.start(1, 2, "node7", 0.2, 1)
    with pytest.raises(
        StallError, match=r"rank 1 waited (0\.[3-9]|[1-9]\d*\.\d) s .* no observer runs"
    ):
        wait_until(lambda: False, CommunicatorWatch(record, crowded=True))
