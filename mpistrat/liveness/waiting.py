"""How ranks wait for each other: for what another writes into shared memory, or for its messages."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from mpistrat.errors import StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.records.job_folder import report_of
from mpistrat.liveness.records.record import ENTRY, GROUP, RAISE
from mpistrat.liveness.records.watch import CommunicatorWatch


def wait_until(
    arrived: Callable[[], bool], watch: CommunicatorWatch, *, yields: bool = True
) -> None:
    """Return once `arrived()` is true: the other ranks of the watch's communicator have done their part.

    It spins for 0.2 ms, yields the core until 2 ms have passed, and then sleeps for 3 % of the time waited so far
    (50 us to 1 ms). Where ranks outnumber cores it does not spin: the others need the core.

    Args:
        yields: False sleeps instead of yielding: a core that is yielded is taken again at once.
    Raises: StallError when the wait was reported as a stall and MPISTRAT_ON_STALL=raise, when it takes longer than the
        watch's timeout and the observer has said who is missing, or when nobody observes this node. Otherwise a
        reported stall or death ends the process from another thread. RankLostError when one of the ranks has failed,
        and the others are to go on without it.
    """
    started = time.monotonic()
    if not watch.crowded:
        spin_until = started + deadlines.RANK_SPINS
        while time.monotonic() < spin_until:
            if arrived():
                return
    looked, timeout = started, watch.timeout
    limit = watch.record.limit_of(timeout)
    while not arrived():
        now = time.monotonic()
        if now - looked > deadlines.RANK_STOOD_STILL:
            started += now - looked  # the job was suspended
        looked = now
        waited = now - started
        if yields and waited < deadlines.RANK_YIELDS:
            os.sched_yield()
            continue
        _raise_if_over(watch, waited, timeout, limit)
        pause = max(waited / 32, deadlines.RANK_SLEEPS_AT_LEAST)
        time.sleep(min(pause, deadlines.RANK_SLEEPS_AT_MOST))


def _raise_if_over(watch: CommunicatorWatch, waited: float, timeout: float, limit: float) -> None:
    raise_if_stalled(watch)
    if watch.revocable_group is not None:
        watch.revocable_group.raise_if_lost()
    record = watch.record
    if 0 < timeout < waited and _is_noticed(watch, waited - timeout):
        raise StallError(
            f"rank {record.rank} waited {waited:.1f} s for the other ranks, and the timeout of its group is "
            f"{timeout:g} s. Find out why the others do not come, or pass a longer timeout= where the group is made"
        )
    # Where there are records, one of the ranks reports in the observer's place.
    patience = deadlines.RANK_WAITS_FOR_LOOK_OF_OBSERVER * (1 + (record.path is not None))
    unobserved = time.monotonic() - record.looked / 1e9
    if 0 < limit < min(waited, unobserved) - patience:
        raise StallError(
            f"rank {record.rank} waited {waited:.1f} s for the other ranks (MPISTRAT_STALL_SECONDS allows "
            f"{limit:g} s), and no observer runs on this node that could say which are missing"
        )


def _is_noticed(watch: CommunicatorWatch, late: float) -> bool:
    """Whether the observer has said for whom this rank waits, or will not: it is gone, or has had time enough."""
    record = watch.record
    observed = time.monotonic() - record.looked / 1e9 < deadlines.RANK_WAITS_FOR_LOOK_OF_OBSERVER
    noticed = record.noticed == record.words[watch.slot + ENTRY]
    return noticed or not observed or late > deadlines.RANK_WAITS_FOR_NOTICE_OF_OBSERVER


def raise_if_stalled(watch: CommunicatorWatch) -> None:
    """Raises: StallError when the observer has decided so for this communicator."""
    record = watch.record
    if record.abort == RAISE and record.stalled == record.words[watch.slot + GROUP]:
        text = f"rank {record.rank} waited too long for the other ranks; see the report on stderr"
        with contextlib.suppress(OSError), open(report_of(record.folder), encoding="utf-8") as file:
            text = file.read()
        raise StallError(text)
