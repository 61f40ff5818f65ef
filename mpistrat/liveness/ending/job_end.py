"""Ends the whole job when one of its ranks fails, or leaves while another rank waits for it.

An uncaught exception calls MPI_Abort. At the end of its program, a rank tells the exit coordinator of each of its
groups. Then it waits until the programs of all ranks of the groups have ended. MPI_Finalize follows. While the program
runs, a thread checks five times a second whether this rank is stuck in a collective, and tells the exit coordinator.
The thread ends this rank once the observer has reported a failure. It needs MPI_THREAD_MULTIPLE.

This file imports mpi4py, so it is imported only on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from mpi4py import MPI

from mpistrat.liveness import deadlines
from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.ending.exit_group import ExitGroup
from mpistrat.liveness.ending.interrupts import Interrupts
from mpistrat.liveness.ending.lost_ranks import LostRanks
from mpistrat.liveness.ending.program_exit import ProgramExit, program_exit, remember_exits
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.liveness.error_text import told_of
from mpistrat.liveness.observer import observation
from mpistrat.liveness.observer.node_records import NodeRecords
from mpistrat.liveness.observer.observer import Observer
from mpistrat.liveness.observer.other_nodes import Raise
from mpistrat.liveness.records.job_folder import report_of
from mpistrat.liveness.records.record import END, ENDING, LEAVING, LEFT, RAISE, RankRecord
from mpistrat.liveness.records.watch import WatchedCalls
from mpistrat.liveness.revocable_group import means_rank_lost

# So many looks in a row must find the observer silent, because it needs a moment when a suspended job goes on.
SILENT_TIMES = 10


class JobEnd:
    """Ends the job in two cases: this rank fails, or its program ends while another rank waits for it in a collective.

    Each process has one instance, `job_end()`. Without MPI_THREAD_MULTIPLE, `watch` watches no communicator and raises
    nothing: rank 0 of the communicator gives a RuntimeWarning, once per process.

    Attributes:
        end_job: takes a text and an exit code, prints the text and ends all processes of the job.
        records: this rank's record, and records of other ranks of its node.
        losses: whether ranks were lost and the others go on without them.
        leaves_together: whether all ranks have agreed to end the program now, so that an exit code other than 0 is no
            failure. Set by: PreemptionCheckpointHandler.
    """

    def __init__(self) -> None:
        self._rank = rank_end()
        self._rank.catch_exceptions()
        self.end_job = self._rank.end_job
        self.records = NodeRecords()
        self.losses = LostRanks()
        self._groups: list[ExitGroup] = []
        self._last_actions: list[Callable[[], None]] = []
        self.leaves_together = self._has_left = self._has_warned = False
        # When the thread first saw that StallError is to be raised, in ns.
        self._raises_since = math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_out, name="mpistrat job end", daemon=True)
        self._watches = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if self._watches:
            self._interrupts = Interrupts()  # only the thread asks it
            remember_exits()
            self._rank.decides_exits = False
            self._thread.start()
            # atexit handlers run last in, first out, and mpi4py finalizes MPI after all of them.
            atexit.register(self._leave)
            # A program may call MPI_Finalize itself. MPI_Finalize first deletes the attributes of MPI_COMM_SELF.
            keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._leave())
            MPI.COMM_SELF.Set_attr(keyval, self)

    def watch(self, calls: WatchedCalls, comm: MPI.Intracomm) -> None:
        """From now on, end the job when a rank of `comm` fails or leaves early. Collective over `comm`.

        Without MPI_THREAD_MULTIPLE it does nothing but warn, once, on rank 0 of `comm`.
        Called by: each new communicator of a strategy.

        Args: calls: this rank's calls on a communicator over the same ranks; calls on communicators that were made from
            it (`parts`) are watched, too.
        """
        if not self._watches:
            if comm.rank == 0 and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    "MPI was started without MPI_THREAD_MULTIPLE: a rank that ends while others wait for it leaves the "
                    'job hanging. Set mpi4py.rc.thread_level = "multiple" (its default) before mpi4py.MPI is imported.',
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        self._groups = self._whole_groups()
        group = next((group for group in self._groups if group.covers(comm)), None)
        if group is None:
            group = ExitGroup(comm, self._rank.who, self.records.record, self.losses)
            self._groups.append(group)
        nodes = (group.other_nodes for group in self._groups if group.other_nodes.are_some)
        self._rank.other_nodes = next(nodes, None)
        group.watched.append(calls)

    def tell_others(self, report: str, group: int, call: int) -> None:
        """Tell the other ranks that this rank has left a collective with an error. Does not wait.

        Ranks that are still in the collective after 1 s raise StallError.

        Args:
            report: the text of their StallError.
            group: the hash of the communicator's name.
            call: the number of the collective on the communicator.
        """
        for watched in self._groups:
            watched.tell(Raise(report, group, call))

    def end_without_finalize(self) -> None:
        """Make this program end without MPI_Finalize, because that may wait for a failed rank (Open MPI #11404).

        It returns at once, and sets `losses.happened`. At its end Python waits for threads and runs atexit handlers in
        their order, as usual. Called by: each surviving rank, after a rank was lost.
        """
        if not self.losses.happened:
            self.losses.happened = True
            # Python calls this when the main thread has ended. So the handler is registered last, and called first.
            threading._register_atexit(atexit.register, self._end_here)  # type: ignore[attr-defined]

    def finish_with(self, stream: Any, action: Callable[[], None]) -> None:
        """Register the `stream` that is to be flushed before this process ends, and `action` for `call_last`.

        Called by: the trace, with its timeline and a function that completes the trace's file.
        """
        self._rank.streams.append(stream)
        self.call_last(action)

    def call_last(self, action: Callable[[], None]) -> None:
        """Register `action` to be called when the programs of all ranks have ended, before MPI_Finalize.

        The action that was registered last is called first. Without MPI_THREAD_MULTIPLE, `action` is called at exit,
        whatever the other ranks do.
        """
        if self._watches:
            self._last_actions.insert(0, action)
        else:
            atexit.register(action)

    def _whole_groups(self) -> list[ExitGroup]:
        """Return the groups that have lost no rank."""
        return [group for group in self._groups if not group.lost]

    def _calls(self) -> Iterator[WatchedCalls]:
        """Yield the calls on the communicators of all groups."""
        for group in self._groups:
            yield from group.calls()

    def _look_out(self) -> None:
        fallback = FallbackObserver()
        while not self._stop.wait(deadlines.RANK_SLEEPS_WATCHING_GROUPS):
            action = self.records.record.abort
            if observation.has_lost_files():
                _end_without_files(self.records.record)
            if action == END:  # the observer has reported a failure
                _end_as_reported(self._calls(), self.records.record.code)
            fallback.look()
            for group in list(self._groups):
                _look_at(group)
            if action == RAISE:
                self._end_if_stuck_in_mpi()
            if self._interrupts.unanswered():
                main = threading.main_thread().ident or 0
                site = call_site(sys._current_frames()[main])
                _end_job(f"was interrupted, but stays in a call at {site}", 130)

    def _end_if_stuck_in_mpi(self) -> None:
        """End the job if the main thread is to raise StallError, but has not come back from MPI for 2 s.

        Called by: this object's thread, while the record's word ABORT is RAISE.
        """
        record = self.records.record
        now = time.monotonic_ns()
        inside_since = now
        for slot in record.slots():
            if slot.since and slot.group == record.stalled:
                inside_since = min(inside_since, slot.since)
        self._raises_since = min(self._raises_since, now)
        stuck_for = (now - max(inside_since, self._raises_since)) / 1e9
        if stuck_for > deadlines.RANK_WAITS_FOR_MAIN_THREAD_TO_RAISE:
            sites = (calls.called_at for calls in self._calls() if calls.waiting_in)
            site = next(sites, "an unknown place")
            why = ""
            with contextlib.suppress(OSError), open(report_of(record.folder)) as report:
                why = f":\n{report.readline().rstrip()}"
            _end_job(f"cannot raise StallError inside MPI, at {site}{why}", 1)

    def _leave(self) -> None:
        """At the end of this rank's program, before MPI_Finalize, wait until the programs of all ranks have ended.

        Then call the actions of `call_last`. It ends the job if this program failed or was interrupted, after a stall,
        or if an exit coordinator decides so. Called by: Python at exit, or MPI_Finalize; only the first call counts.
        """
        if self._has_left or not self._rank.is_running():
            return
        self._has_left = True
        end = program_exit()
        if end.failed:
            _end_job(end.how, end.code)
        if self.leaves_together:
            end = ProgramExit(0, end.how)
        self._rank.flush()
        try:
            self._stop.set()
            self._thread.join()
            self._leave_groups(end)
            for action in self._last_actions:
                action()
            self.records.record.state = LEFT
            are_whole = len(self._whole_groups()) == len(self._groups)
            if not are_whole and not self.losses.happened:
                os._exit(end.code)  # a rank was lost just now: too late for `end_without_finalize`
        except KeyboardInterrupt:
            _end_job("was interrupted", 130)
        except MPI.Exception as error:
            if not means_rank_lost(error):
                raise
            self.end_job(
                f"ending the job: a rank failed while {self._rank.who} waited at its end for all", 1
            )

    def _leave_groups(self, end: ProgramExit) -> None:
        """Tell the groups that this rank's program has ended, and wait until all their ranks' programs have ended.

        If the observer has reported a failure, the job ends. If the ranks were to raise StallError, wait first, at
        most as long as a collective may last.
        """
        record = self.records.record
        record.end = end.how
        record.state = LEAVING
        waiting = self._whole_groups()
        with self.losses.tolerated():
            for group in waiting:
                group.leave(end)
        since = time.monotonic()

        def has_waited() -> bool:
            # Ranks that caught a StallError may still be saving their state.
            patience = record.limit if record.abort == RAISE else 0.0
            return record.abort != 0 and time.monotonic() - since > patience

        self._wait_for(waiting, has_waited)
        if record.abort:
            _end_job(f"{end.how} after a stall", end.code or 1)

    def _wait_for(self, groups: list[ExitGroup], has_waited: Callable[[], bool]) -> None:
        """Wait until the programs of all ranks of `groups` have ended, or `has_waited()` is true.

        It does not wait for a group that has lost a rank. It ends the job if an exit coordinator decides so.
        """

        def is_over(group: ExitGroup) -> bool:
            with self.losses.tolerated():
                if group.lost or group.all_ended():
                    return True
                _end_if_decided(group)
                return False
            return True

        pause = deadlines.RANK_SLEEPS_AT_ITS_END
        while groups := [group for group in groups if not is_over(group)]:
            if has_waited():
                return
            time.sleep(pause)
            pause = min(pause * 1.5, deadlines.RANK_SLEEPS_AT_ITS_END_AT_MOST)

    def _end_here(self) -> NoReturn:
        """End this process as Python would, but without MPI_Finalize: run the exit handlers, flush, and exit.

        Before the exit, it waits at most 60 s until the exit handlers of the surviving ranks have run, because mpirun
        kills all ranks when one returns an exit code other than 0. Called by: Python, as the first exit handler.
        """
        code = program_exit().code
        atexit.unregister(self._end_here)
        atexit._run_exitfuncs()
        self._rank.flush()
        try:
            if self._watches and self._rank.is_running():
                until = time.monotonic() + deadlines.RANK_WAITS_FOR_EXIT_HANDLERS_OF_OTHERS
                with contextlib.suppress(MPI.Exception):  # one more rank is lost
                    waiting = self._whole_groups()
                    for group in waiting:
                        group.end()
                    self._wait_for(waiting, lambda: time.monotonic() > until)
        finally:  # also when a signal handler raises: the rest of Python's end may hang
            os._exit(code)


def _look_at(group: ExitGroup) -> None:
    try:
        if not group.lost:
            if group.look():
                rank_end().flush()  # this rank may never print anything more
            _end_if_decided(group)
    except MPI.Exception as error:
        if not means_rank_lost(error) and not group.lost:
            raise


def _end_if_decided(group: ExitGroup) -> None:
    if verdict := group.coordinator.verdict(time.monotonic()):
        why, code = verdict
        rank_end().end_job(f"ending the job: {why}", code)


def _end_as_reported(calls: Iterable[WatchedCalls], code: int) -> NoReturn:
    """End this rank, and the job, with the exit code `code`, because the observer has reported a failure.

    First print each error in `calls` that this rank waits to tell the other ranks: it may have caused the failure.
    """
    rank = rank_end()
    for watched in calls:
        error = watched.raising
        if error is not None:
            rank.say_last(f"{rank.who} failed\n{told_of(error, rank.rank)}")
    rank.abort(code)


def _end_without_files(record: RankRecord) -> NoReturn:
    """End this process with exit code 1, because the program has closed all files, and MPI's among them.

    MPI has lost its connection to the launcher. So MPI_Abort would not reach it, and MPI may print errors for ever.
    """
    record.state = ENDING
    rank = rank_end()
    rank.say_last(
        f"ending the job: {rank.who} has closed files that it had not opened, MPI's among them, as os.closerange() "
        "does in programs that leave their terminal. Close only files that the program has opened."
    )
    os._exit(1)


def _end_job(why: str, code: int) -> NoReturn:
    """Print that this rank ends the job, and `why` (a sentence without its subject); end the job with `code`."""
    rank = rank_end()
    rank.end_job(f"ending the job: {rank.who} {why}", code)


@functools.cache
def job_end() -> JobEnd:
    """Return this process's `JobEnd`. The first call makes it; MPI must be running."""
    return JobEnd()


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
