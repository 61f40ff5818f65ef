"""A rank reports a stall in place of its node's observer, if that is gone or stopped."""

from __future__ import annotations

import time

from mpistrat.liveness import deadlines
from mpistrat.liveness.observer import observation
from mpistrat.liveness.observer.observer import Observer

SILENT_TIMES = 10  # in a row that find it silent: when a job that was suspended goes on, the observer needs a moment


class FallbackObserver:
    """Called by: the thread of each rank that looks a few times a second."""

    _silent = 0

    def look(self) -> None:
        """Report, if this rank waits for too long and the observer says nothing; of a node's ranks, one does."""
        observed = observation.current
        if observed is None or observed.record.abort:
            return
        record, now = observed.record, time.monotonic()
        waits = any(
            slot.since and 0 < record.limit_of(slot.timeout) < now - slot.since / 1e9
            for slot in record.slots()
        )
        is_silent = now - record.looked / 1e9 > deadlines.RANK_WAITS_FOR_LOOK_OF_OBSERVER
        self._silent = self._silent + 1 if waits and is_silent else 0
        if self._silent < SILENT_TIMES:
            return
        with observed.folder.alone("stand-in") as alone:
            if alone:
                Observer(observed.folder).report_stall()
                observation.wake_observer(record)
