"""Waits of a rank for other ranks: for their writes into shared memory, or for their messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpistrat.errors import StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.processes import text_in
from mpistrat.liveness.records.job_folder import report_of
from mpistrat.liveness.records.record import ENTRY, GROUP, RAISE
from mpistrat.liveness.records.watch import CommunicatorWatch


def wait_until(
    arrived: Callable[[], bool], watch: CommunicatorWatch, *, yields: bool = True
) -> None:
    """Wait until `arrived()` is true, because the other ranks of the watch's communicator have done their part.

    Called by: the agreement of ranks on a collective, transports, and messages of torch.distributed.

    The rank spins for 0.2 ms, yields the core until 2 ms have passed, and then sleeps for 3 % of the time waited so far
    (50 us to 1 ms). Where ranks outnumber cores, the rank does not spin, because other ranks need the core.

    Args:
        arrived: called again and again; it must not wait.
        watch: this rank's calls on the communicator in shared memory, and its timeout.
        yields: False: sleep instead of yielding the core, because a rank that yields soon takes the core again.
    Raises: StallError if the observer has reported this wait as a stall and MPISTRAT_ON_STALL=raise; if the wait lasts
        longer than the watch's timeout, and the observer has reported the missing ranks; or if no observer runs on this
        node, and the limit has passed. RankLostError if a rank has failed and the others are to go on without it. With
        MPISTRAT_ON_STALL=end, a reported stall ends this process from another thread; so does a reported death.
    """
    started = time.monotonic()
    if not watch.crowded:
        spin_until = started + deadlines.RANK_SPINS
        while time.monotonic() < spin_until:
            if arrived():
                return
    looked = started
    timeout = watch.timeout
    limit = watch.record.limit_of(timeout)
    while not arrived():
        now = time.monotonic()
        if now - looked > deadlines.RANK_STOOD_STILL:
            started += now - looked  # the job was suspended meanwhile
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
            f"{timeout:g} s. Find out why the others do not come, or make the group with a longer timeout="
        )
    # If the rank's record is a file, a rank of the node may still report in place of the observer, so wait twice as
    # long.
    patience = deadlines.RANK_WAITS_FOR_LOOK_OF_OBSERVER * (1 + (record.path is not None))
    unobserved = time.monotonic() - record.looked / 1e9
    if 0 < limit < min(waited, unobserved) - patience:
        raise StallError(
            f"rank {record.rank} waited {waited:.1f} s for the other ranks (MPISTRAT_STALL_SECONDS allows "
            f"{limit:g} s), and no observer runs on this node to report the missing ranks"
        )


def _is_noticed(watch: CommunicatorWatch, late: float) -> bool:
    """Whether this rank may raise StallError for a wait that has passed its timeout.

    Args: late: the seconds since the timeout passed.
    Returns: True if the observer has reported the missing ranks, has not looked at the ranks for 5 s, or has had 8 s
        for the report. False: wait on, so that the report is printed before the error.
    """
    record = watch.record
    observed = time.monotonic() - record.looked / 1e9 < deadlines.RANK_WAITS_FOR_LOOK_OF_OBSERVER
    noticed = record.noticed == record.words[watch.slot + ENTRY]
    return noticed or not observed or late > deadlines.RANK_WAITS_FOR_NOTICE_OF_OBSERVER


def raise_if_stalled(watch: CommunicatorWatch) -> None:
    """Raise StallError if this rank is to leave the present call of the watch's communicator; else do nothing.

    It is to leave the call if the observer has reported a stall and MPISTRAT_ON_STALL=raise, or if another rank has
    left the call with an error. The text is the report of the job's folder; a short text if that cannot be read.
    """
    record = watch.record
    if record.abort == RAISE and record.stalled == record.words[watch.slot + GROUP]:
        otherwise = (
            f"rank {record.rank} waited too long for the other ranks; see the report on stderr"
        )
        raise StallError(text_in(report_of(record.folder)) or otherwise)
