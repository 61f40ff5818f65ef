"""Records collectives that were submitted to an accelerator and do not end, so that they are reported as stalls.

The Python calls have returned, so no rank waits in them. A thread of this process looks whether the oldest collective
has ended. If it has not ended after 1 s (a quarter of the stall limit, if that is less), the thread writes into this
rank's record in shared memory that the rank is in this call. The node's observer process reads in the record how long
the call has lasted, and reports a stall.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.communicators.contract.unchecked import Unchecked
from mpistrat.communicators.graph_capture import let_this_thread_query_events
from mpistrat.communicators.transports.accelerator.library import DeviceLibrary
from mpistrat.errors import StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.records.record import CALLS, SINCE
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import raise_if_stalled
from mpistrat.machine.devices import make_own_current

if TYPE_CHECKING:
    from mpistrat.communicators.transports.accelerator.collective_group import CollectiveGroup

# A collective is recorded after this share of MPISTRAT_STALL_SECONDS, if that is less than 1 s.
SHARE_OF_THE_LIMIT = 0.25


class _SubmittedCall(NamedTuple):
    number: int
    event: Any
    submitted: int
    text: bytes
    call_bytes: int


class PendingCalls:
    """The submitted collectives of one communicator, in the order of their submission.

    Args:
        contract: the communicator's contract (it checks and names each call); the source of the calls' texts.
        watch: this rank's slot in its record for these collectives alone. The observer reads it.
        library: the library of the buffers.
        group: the group that does the collectives. `look` aborts it when the observer has reported a stall and
            MPISTRAT_ON_STALL=raise.
        listens: whether a thread other than the program's may receive other ranks' failures (MPI_THREAD_MULTIPLE).
    """

    def __init__(
        self,
        contract: Unchecked,
        watch: CommunicatorWatch,
        library: DeviceLibrary,
        group: CollectiveGroup[Any],
        listens: bool,
    ) -> None:
        self.name = contract.name
        self._contract = contract
        self._watch = watch
        self._library = library
        self._group = group
        self._listens = listens
        self._calls: deque[_SubmittedCall] = deque()
        self._progress = 0  # when `look` last saw the end of a collective, in ns
        self._is_recorded = False
        self._number = 0
        self._words = watch.record.words
        self._record_slot = watch.slot
        self._event_watcher = event_watcher()
        self._event_watcher.watched.add(self)

    def add(self) -> None:
        """Note the collective that this rank has just submitted, by an event in the current stream.

        The stream already waits for the collective, so the event comes at the collective's end. Wakes the
        `EventWatcher`.   Called by: `NativeTransport`, after each collective that it has submitted.
        """
        library = self._library
        event = library.record(library.current_stream())
        self._number += 1
        self._words[self._record_slot + CALLS] = self._number
        recorded = self._contract.recorded[:2]
        self._calls.append(_SubmittedCall(self._number, event, time.monotonic_ns(), *recorded))
        if not self._event_watcher.is_awake.is_set():
            self._event_watcher.is_awake.set()

    def are_done(self) -> bool:
        """Return whether all submitted collectives have ended. They end in order, so only the last one is asked."""
        try:
            return self._library.is_done(self._calls[-1].event)
        except IndexError:
            return True

    def look(self) -> bool:
        """Drop the collectives that have ended; record the oldest if it lasts long; abort the group after a stall.

        It also aborts the group if another rank has failed (with `listens`).
        Called by: the thread of `EventWatcher`, four times a second while collectives are under way.
        Returns: whether to look again: False if all collectives have ended, or the group was aborted.
        """
        if self._listens and self._calls:  # before the first call, `CollectiveGroup.start` listens
            self._group.hear()
        while self._calls and self._library.is_done(self._calls[0].event):
            self._calls.popleft()
            self._progress = time.monotonic_ns()
            self._leave()
        if not self._calls or self._group.group is None:
            self._calls.clear()
            self._leave()
            return False
        self._record_oldest()
        try:
            raise_if_stalled(self._watch)
        except StallError as error:
            self._group.abort(error)
        return True

    def _record_oldest(self) -> None:
        """Write into this rank's record that it is in the oldest collective, if that has lasted at least 1 s.

        The time counts from its submission, or from the end of the collective before it, if that is later. With a stall
        limit under 4 s, a quarter of the limit is enough.
        """
        oldest = self._calls[0]
        record = self._watch.record
        since = max(oldest.submitted, self._progress)
        patience = deadlines.RANK_WAITS_FOR_RECORD_OF_KERNEL
        if record.limit:
            patience = min(patience, record.limit * SHARE_OF_THE_LIMIT)
        if self._is_recorded or time.monotonic_ns() - since < patience * 1e9:
            return
        self._is_recorded = True
        record.enter(self._record_slot, oldest.number, oldest.text, oldest.call_bytes)
        record.waited(self._record_slot)  # all ranks have entered this collective
        self._words[self._record_slot + CALLS] = self._number
        self._words[self._record_slot + SINCE] = since

    def _leave(self) -> None:
        self._is_recorded = False
        self._words[self._record_slot + SINCE] = 0


class EventWatcher:
    """A thread that calls `look` on each `PendingCalls` in `watched` every 0.25 s, and sleeps if none has work.

    A `PendingCalls` is dropped from `watched` if its `look` raises an error.
    """

    def __init__(self) -> None:
        self.is_awake = threading.Event()
        self.watched: weakref.WeakSet[PendingCalls] = weakref.WeakSet()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat device calls", daemon=True)
        self._thread.start()
        job_end().call_last(self._end)

    def _run(self) -> None:
        make_own_current()
        let_this_thread_query_events()
        while self.is_awake.wait() and not self._stop.wait(deadlines.RANK_SLEEPS_WATCHING_KERNELS):
            self.is_awake.clear()
            for calls in list(self.watched):
                try:
                    if calls.look():
                        self.is_awake.set()
                except Exception:  # the device has failed, and the program gets this error, too
                    self.watched.discard(calls)

    def _end(self) -> None:
        self._stop.set()
        self.is_awake.set()
        self._thread.join(deadlines.RANK_WAITS_FOR_THREAD_IN_LIBRARY)


@functools.cache
def event_watcher() -> EventWatcher:
    """Return this process's `EventWatcher`; the first call starts its thread."""
    return EventWatcher()
