"""The one way to wait for another rank in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpistrat.errors import StallError
from mpistrat.flight_recorder.job_folder import report_of
from mpistrat.flight_recorder.record import ABORT, LIMIT, RAISE, RANK, RankRecord

SPIN_SECONDS = 200e-6
YIELD_SECONDS = 2e-3
LONGEST_PAUSE = 1e-3
SHORTEST_PAUSE = 50e-6
# The observer reports at the limit; a rank that is still waiting then has none.
SECONDS_FOR_THE_OBSERVER = 5.0


def wait_until(arrived: Callable[[], bool], record: RankRecord, crowded: bool) -> None:
    """Return once `arrived()` is true; `record` is this rank's own.

    It spins for 0.2 ms, yields the core until 2 ms have passed, and then sleeps for 3 % of the time waited so far
    (50 us to 1 ms). With `crowded` (more ranks than cores) it does not spin: the others need the core.
    Raises: StallError when the wait was reported as a stall and MPISTRAT_ON_STALL=raise, or when nobody observes this
        node. Otherwise a reported stall ends the process from another thread.
    """
    started = time.monotonic()
    if not crowded:
        spin_until = started + SPIN_SECONDS
        while time.monotonic() < spin_until:
            if arrived():
                return
    words = record.words
    limit = words[LIMIT] / 1e9
    while not arrived():
        waited = time.monotonic() - started
        if waited < YIELD_SECONDS:
            os.sched_yield()
            continue
        if words[ABORT] == RAISE:
            raise StallError(_report(record))
        if limit and waited > limit + SECONDS_FOR_THE_OBSERVER and not words[ABORT]:
            raise StallError(
                f"rank {words[RANK]} waited {waited:.1f} s for the other ranks (MPISTRAT_STALL_SECONDS allows "
                f"{limit:g} s), and no observer runs on this node that could say which are missing"
            )
        time.sleep(min(max(waited / 32, SHORTEST_PAUSE), LONGEST_PAUSE))


def _report(record: RankRecord) -> str:
    try:
        with open(report_of(record.folder), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return f"rank {record.words[RANK]} waited too long for the other ranks; see the report on stderr"
