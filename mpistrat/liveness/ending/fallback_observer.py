"""A rank reports a stall in place of its node's observer, if the observer is gone or stopped."""

from __future__ import annotations

import time

from mpistrat.liveness import deadlines
from mpistrat.liveness.observer import observation
from mpistrat.liveness.observer.observer import Observer

# So many looks in a row must find the observer silent, because it needs a moment when a suspended job goes on.
SILENT_TIMES = 10


class FallbackObserver:
    """Reports a stall if the node's observer does not. The thread of `JobEnd` in each rank calls it."""

    _silent = 0

    def look(self) -> None:
        """Report a stall if this rank has waited too long and the observer has been silent in 10 looks in a row.

        Silent means that the observer has not looked at the ranks for 5 s. Only one rank of a node reports. It then
        sends SIGCONT to an observer that was stopped. Called by: the thread of `JobEnd`, five times a second.
        """
        observed = observation.current
        if observed is None or observed.record.abort:
            return
        record = observed.record
        now = time.monotonic()
        waits = False
        for slot in record.slots():
            waited = now - slot.since / 1e9
            if slot.since and 0 < record.limit_of(slot.timeout) < waited:
                waits = True
        is_silent = now - record.looked / 1e9 > deadlines.RANK_WAITS_FOR_LOOK_OF_OBSERVER
        self._silent = self._silent + 1 if waits and is_silent else 0
        if self._silent < SILENT_TIMES:
            return
        with observed.folder.alone("stand-in") as alone:
            if alone:
                Observer(observed.folder).report_stall()
                observation.wake_observer(record)
