"""The observer: one small process per node that watches the ranks, reports for them, and ends a moment after them.

It runs in its own session, so that the launcher's clean-up does not kill it, and holds no descriptor of the launcher.
It sleeps in epoll, so that deaths wake it up at once, and looks at the records twice a second, more often at the start.

It makes one report, on a rank's stderr and in a file: of a rank that dies without a message, of a collective that lasts
longer than the limit, or of a rank that has ended while others wait for it to start. It prints the report and has the
ranks end the job before it writes the file, because the file system may hang. It kills ranks that do not react. If a
rank has ended by os._exit(0), MPICH's launcher may still return 0, so the observer kills the launcher, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from mpistrat.liveness import deadlines
from mpistrat.liveness.bounded_waits import soon, within
from mpistrat.liveness.call_site import places_of
from mpistrat.liveness.observer import failure_detector, report
from mpistrat.liveness.observer.failure_detector import FailureDetector, ObservedRank, Wait
from mpistrat.liveness.observer.node_accounts import Account, find_accounts, forget_accounts
from mpistrat.liveness.observer.stderr_proxy import StderrProxy
from mpistrat.liveness.processes import DEAD, describe_exit, exit_code, is_launcher, launcher_of
from mpistrat.liveness.records.job_folder import JobFolder, report_of, words_of
from mpistrat.liveness.records.record import ANNOUNCED, END, ENDING, LEAVING, RAISE, SEEN
from mpistrat.machine.private_files import create, private

_OUTCOMES = {END: "Ending the job.", RAISE: "Raising StallError on the ranks that wait."}


class Observer:
    """Observes the ranks of one node: reports ranks that failed or wait too long, and makes the job end.

    Made by: the observer's process, to `run`; a rank's `FallbackObserver`, to `report_stall`.

    Args: folder: the job's folder, with the ranks' records.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._started = time.monotonic()
        self._detector = FailureDetector(folder.path, self._be_ready_to_speak)
        self._pauses = Pauses()
        self._launcher: int | None = None  # the pid; None: no launcher is found
        self._stderr = StderrProxy()
        self._report_file = ReportFile()
        self._reported = 0.0  # when a report was made; 0.0: not yet
        # When a rank was first seen to end the job; infinite: not yet.
        self._ending_since = math.inf
        self._killed = False
        # When ended ranks were first seen while other ranks wait for all ranks to start; infinite: not yet.
        self._absent_since = math.inf
        # When ranks were first seen to wait for the other ranks after their programs had ended; infinite: not yet.
        self._leaving_since = math.inf
        self._noticed_leaving = False
        self._has_noticed_wait = False

    def run(self) -> None:
        """Observe the ranks until all have ended and no rank can start any more; then remove the folder.

        The folder stays if another process still holds it after some seconds, see `_patience`. At the end, kill a
        launcher that would return 0 although the observer has reported a failure.
        """
        detector = self._detector
        alone_since = time.monotonic()
        while not detector.all_are_dead or time.monotonic() - alone_since < self._patience():
            self._look()
            if not detector.all_are_dead or self._others_may_start():
                alone_since = time.monotonic()
            elif detector.ranks and self._folder.remove_if_last():
                break
        self._tell_where_the_report_is(deadlines.OBSERVER_WAITS_FOR_REPORT_FILE_AT_END)
        if self._reported and self._launcher and self._may_return_0():
            # The report may have gone to a rank's stderr, a pipe that the launcher reads: give it time.
            if self._stderr.owner != self._launcher:
                time.sleep(deadlines.OBSERVER_WAITS_FOR_LAUNCHER_TO_READ)
            _end_launcher(self._launcher)
        self._stderr.give_back()

    def _look(self) -> None:
        self._find_ranks()
        for rank in self._detector.ranks:
            rank.record.observer = os.getpid()
        is_new = time.monotonic() - self._started < deadlines.OBSERVER_IS_NEW
        pause = deadlines.OBSERVER_SLEEPS_AT_START if is_new else deadlines.OBSERVER_SLEEPS
        self._detector.wait(pause)
        self._pauses.notice(self._detector.ranks)
        self._speak_for_ranks()
        self._judge_starts()
        self._judge_deaths()
        self._judge_waits()
        self._see_to_the_end()
        self._tell_who_waits_at_the_end()
        self._tell_where_the_report_is(0.0)

    def report_stall(self) -> None:
        """Look at the ranks once, and report a stall if there is one.

        Called by: a rank (`FallbackObserver`), if the node's observer is gone or stopped.
        """
        self._find_ranks()
        self._judge_waits()
        self._tell_where_the_report_is(deadlines.OBSERVER_WAITS_FOR_REPORT_FILE_AT_END)

    def _patience(self) -> float:
        """Return how many seconds to go on without living ranks while another process holds a lock on the folder.

        The other process may be a rank that is about to make its record, or a child of a rank: 60 s before the first
        rank was found, and 2 s afterwards.
        """
        if self._detector.ranks:
            return deadlines.OBSERVER_WAITS_FOR_LATE_RANK
        return deadlines.OBSERVER_WAITS_FOR_FIRST_RANK

    def _others_may_start(self) -> bool:
        """Whether the observer stays when all ranks of this node have ended, because further ranks can still start.

        Late ranks would wait for ranks that have ended, and that needs a report. False once the observer has reported,
        and 300 s after the first death.
        """
        dead_for = time.monotonic() - self._detector.first_died
        is_early = dead_for < deadlines.OBSERVER_WAITS_FOR_OTHERS_TO_START and not self._reported
        return is_early and failure_detector.others_may_start(self._detector.ranks)

    def _find_ranks(self) -> None:
        for rank in self._detector.find():
            self._launcher = self._launcher or launcher_of(rank.pid)
            self._killed = False  # if the job is ending, a rank that starts late is killed, too
        self._promise_to_look(0.0)

    def _speakers(self) -> Iterator[int]:
        """Yield the pids of processes with a stderr that the observer may use: living ranks, then the launcher."""
        yield from (rank.pid for rank in self._detector.ranks if not rank.dead)
        if self._launcher is not None:
            yield self._launcher

    def _be_ready_to_speak(self, ending: ObservedRank) -> None:
        """Open a stderr if the rank `ending` may need a report, before the launcher kills the other ranks.

        It also answers an announced exit. While the observer holds a rank's stderr, the launcher does not end.
        Called by: the detector, at once when a rank announces its exit, closes its files or dies.
        """
        if not ending.ended_well or ending.record.say:
            self._stderr.borrow(self._speakers())
        if ending.record.exits == ANNOUNCED:
            ending.record.exits = SEEN

    def _say(self, text: str) -> None:
        within(deadlines.OBSERVER_WAITS_FOR_WRITE, lambda: self._stderr.say(text, self._speakers()))

    def _speak_for_ranks(self) -> None:
        """Print the texts that ranks without a usable stderr have left in the job's folder, see `observation.say`."""
        for rank in self._detector.ranks:
            if rank.record.say:
                words = words_of(self._folder.path, rank.number)
                with contextlib.suppress(OSError), open(words, encoding="utf-8") as file:
                    self._say(file.read())
                rank.record.say = 0

    def _promise_to_look(self, seconds: float) -> None:
        """Write to the ranks' records that the observer looks again within `seconds`.

        5 s after that time, ranks assume that the observer is gone.
        """
        for rank in self._detector.ranks:
            rank.record.looked = time.monotonic_ns() + int(seconds * 1e9)

    @property
    def _is_explained(self) -> bool:
        """Whether this observer has reported why the job ends, or a rank ends the job and so reports it."""
        return bool(self._reported or self._detector.in_state(ENDING))

    def _judge_starts(self) -> None:
        """End the job if ranks wait for all ranks to start, while a rank has ended and no later program can replace it.

        This must last for 1 s, or a waiting rank must have died. Nothing happens once a report was made, or while a
        rank ends the job and so reports.
        """
        ranks = self._detector.ranks
        waiting = [rank for rank in ranks if rank.record.starting]
        absent = [rank for rank in ranks if rank.has_ended]
        if not (waiting and absent) or self._is_explained:
            self._absent_since = math.inf
            return
        self._absent_since = min(self._absent_since, time.monotonic())
        # Open MPI's launcher then ends the job, and does not say why the waiting ranks die.
        ended_by_launcher = any(rank.dead for rank in waiting)
        absent_for = time.monotonic() - self._absent_since
        if ended_by_launcher or absent_for > deadlines.OBSERVER_WAITS_FOR_ABSENT_RANKS:
            self._report(self._compose(report.absence_report, absent, waiting), END, 1)

    def _judge_deaths(self) -> None:
        """Report the first death of a rank that needs a report, and end the job.

        If all such ranks are expendable (`run_elastic`, parameter servers) and other ranks may go on, print for each
        that the others go on without it, and do not end the job. Nothing happens once a report was made, while a rank
        ends the job, or if another node reports.
        """
        detector = self._detector
        unexplained = detector.unexplained()
        if not unexplained or self._is_explained or self._is_reported_elsewhere():
            return
        if detector.others_may_go_on() and all(rank.record.expendable for rank in unexplained):
            for rank in unexplained:  # the surviving ranks print how many they are
                rank.lost = True
                detector.first_died = 0.0
                how = describe_exit(rank.status)
                self._say(f"\nmpistrat: {rank.who} {how}; the others go on without it\n")
        elif not detector.exited_together(unexplained):
            first = failure_detector.first_death(unexplained)
            text = self._compose(report.death_report, detector.ranks, first)
            self._report(text, END, exit_code(first.status))

    def _is_reported_elsewhere(self) -> bool:
        """Whether another node has asked about a stall in the last 15 s, because its observer then makes the report."""
        requests = [rank.record.asked for rank in self._detector.ranks]
        last = max(requests, default=0) / 1e9
        return last > 0 and time.monotonic() - last < deadlines.OBSERVER_REPORTS

    def _judge_waits(self) -> None:
        """Report the longest wait in a collective that has lasted longer than its limit, and end the job or raise.

        Also print a report of each wait that has reached its timeout.

        The node of the communicator's rank 0 reports first. Other nodes wait 4 s longer, so that only one node reports.
        """
        ranks = self._detector.going_on
        if self._is_explained or any(rank.record.abort for rank in ranks):
            return  # a rank, a rank in place of this observer, or another node has reported
        numbers = [rank.number for rank in self._detector.ranks]
        for wait in failure_detector.waits(ranks):
            grace = wait.slot.first not in numbers or self._is_reported_elsewhere()
            waited = self._pauses.seconds_since(wait.since / 1e9)
            overdue = waited - deadlines.OBSERVER_WAITS_FOR_FIRST_NODE * grace
            if 0 < wait.limit < overdue:
                text = self._compose(self._stall_report, wait, waited)
                if wait.lasts():  # the ranks may have left it while the report was made
                    self._report(text, wait.record.on_stall, 1, wait.slot.group)
                return
            if wait.timeout and not wait.noticed:
                self._notice_wait(wait, waited, overdue)

    def _notice_wait(self, wait: Wait, waited: float, overdue: float) -> None:
        """Print a report of the missing ranks, without ending the job, if `wait` has lasted long enough.

        That is when the timeout of the ranks has passed, so that they raise StallError themselves; also, once, for the
        first wait longer than MPISTRAT_STALL_SECONDS.

        Args:
            waited: how long the ranks have waited, in seconds.
            overdue: `waited`, less 4 s if another node is to report.
        """
        limit = wait.record.limit
        passed = overdue > wait.timeout
        is_long = not self._has_noticed_wait and 0 < limit < overdue
        if not (passed or is_long):
            return
        if not self._is_reported_elsewhere():
            text = self._compose(self._stall_report, wait, waited)
            if not wait.lasts():  # the ranks may have left it while the report was made
                return
            end = _OUTCOMES[RAISE] if passed else "They go on waiting until then."
            self._say(f"\nmpistrat: {text}\nmpistrat: {end}\n")
        self._has_noticed_wait = True
        if passed:
            for rank, slot in wait.inside.items():
                rank.record.noticed = slot.entry

    def _stall_report(self, wait: Wait, waited: float) -> str:
        slot = wait.slot
        missing: list[int] = []
        lines: list[str] = []
        for other in self._ask_other_nodes(wait):
            missing += other.missing(slot.group, slot.calls, wait.members)
            lines += other.lines
        return report.stall_report(self._detector.going_on, wait, waited, missing, lines)

    def _ask_other_nodes(self, wait: Wait) -> list[Account]:
        if not wait.elsewhere:
            return []
        path = self._folder.path
        forget_accounts(path)
        wait.record.ask = 1
        soon(lambda: find_accounts(path) is not None, deadlines.OBSERVER_WAITS_FOR_OTHER_NODES)
        return find_accounts(path) or []

    def _report(self, text: str, action: int, code: int, stalled: int = 0) -> None:
        """Print the report, tell all ranks of this node to end the job or to raise, and write the report file.

        Args:
            text: the report.
            action: END: the ranks end the job; RAISE: they raise StallError.
            code: the exit code of the job.
            stalled: the hash of the stalled communicator's name; 0: no stall.
        """
        self._say(f"\nmpistrat: {text}\nmpistrat: {_OUTCOMES[action]}\n")
        if action == RAISE:  # the ranks raise StallError with this text
            with contextlib.suppress(OSError), create(report_of(self._folder.path)) as file:
                file.write(text)
        self._reported = time.monotonic()
        for rank in self._detector.ranks:
            rank.record.code = code
            rank.record.stalled = stalled
            rank.record.abort = action  # written last: the rank acts on it
        self._report_file.write(f"{text}\n")
        self._tell_where_the_report_is(deadlines.OBSERVER_WAITS_FOR_REPORT_FILE)

    def _may_return_0(self) -> bool:
        """Whether MPICH's launcher may return 0, because a rank may have ended by os._exit(0)."""
        exits = any(rank.record.exits for rank in self._detector.ranks)
        statuses = {rank.status for rank in self._detector.unexplained()}
        return exits or not statuses.isdisjoint((0, None))

    def _tell_where_the_report_is(self, seconds: float) -> None:
        """Print the report file's path once the file is written, and then close the stderr, so that the launcher ends.

        If the file is not written 2 s after the report, close the stderr without it. If the launcher may return 0, the
        stderr stays open until the observer ends.

        Args: seconds: how long to wait for the file; 0: only ask.
        """
        if self._report_file.is_written(seconds):
            self._say(f"mpistrat: This report is in {self._report_file.path}.\n")
        elif time.monotonic() - self._reported < deadlines.OBSERVER_WAITS_FOR_REPORT_FILE_AT_END:
            return
        if not self._may_return_0():
            self._stderr.give_back()

    def _compose(self, compose: Callable[..., str], *arguments: Any) -> str:
        """Return the report that `compose(*arguments)` returns; if it raises an error, a text with this error.

        It may take up to 15 s, because ranks are asked for their stacks. Meanwhile the ranks do not assume that the
        observer is gone, and this time does not count as a pause of the job.
        """
        self._promise_to_look(deadlines.OBSERVER_REPORTS)
        try:
            return compose(*arguments)
        except Exception as error:  # the job ends all the same
            places = "".join(f"\n      {place}" for place in places_of(error))
            return f"ranks failed, or wait too long, but the observer failed to say why: {error!r}{places}"
        finally:
            self._pauses.restart()
            self._promise_to_look(0.0)

    def _see_to_the_end(self) -> None:
        """Make sure that the job ends, once a rank ends it or this observer has told the ranks to end.

        1 s after a rank began to end the job, tell the other ranks to end. Kill the ranks that live 2 s after the
        observer's report, or 10 s after a rank began to end the job (3 s if that rank is dead). They are killed once.
        """
        now = time.monotonic()
        if self._detector.in_state(ENDING):
            self._ending_since = min(self._ending_since, now)
        ending = now - self._ending_since
        if ending > deadlines.OBSERVER_WAITS_FOR_LAUNCHER:
            # The other ranks may live: under a fault tolerant MPI, MPI_Abort ends only the rank that calls it. Before
            # MPI_Init, a rank's exit code ends no other rank.
            for rank in self._detector.ranks:
                if not rank.record.abort and rank.record.state != ENDING:
                    rank.record.code = 1
                    rank.record.abort = END
        has_had_time = self._is_unheard(now) or ending > self._patience_with_ending()
        if has_had_time and not self._killed:
            self._killed = True
            for rank in self._detector.ranks:
                if rank.letter not in DEAD:
                    with contextlib.suppress(OSError):
                        os.kill(rank.pid, signal.SIGKILL)

    def _is_unheard(self, now: float) -> bool:
        """Whether the ranks have had 2 s to end since this observer told them to; the caller then kills them (SIGKILL).

        Returns: False if the observer has not told the ranks anything, or has told them to raise StallError.
        """
        orders = [rank.record.abort for rank in self._detector.ranks]
        told_for = now - (self._reported or now)
        return told_for >= deadlines.OBSERVER_WAITS_FOR_TOLD_RANKS and RAISE not in orders

    def _patience_with_ending(self) -> float:
        """Return how many seconds the living ranks have after a rank began to end the job; then they are killed.

        10; 3 if all ranks that end the job are dead, because the other ranks were told to end 1 s after the beginning.
        """
        if all(rank.dead for rank in self._detector.in_state(ENDING)):
            return deadlines.OBSERVER_WAITS_FOR_TOLD_RANKS + deadlines.OBSERVER_WAITS_FOR_LAUNCHER
        return deadlines.OBSERVER_WAITS_FOR_ENDING_RANK

    def _tell_who_waits_at_the_end(self) -> None:
        """Print a notice, once, if ranks have waited at the end of their programs for longer than the limit.

        That may be right. But if another rank waits for them in an MPI call of the user's program, the job hangs.
        """
        leaving = self._detector.in_state(LEAVING)
        if self._noticed_leaving or self._reported or not leaving:
            return
        self._leaving_since = min(self._leaving_since, time.monotonic())
        limit = leaving[0].record.limit
        waited = self._pauses.seconds_since(self._leaving_since)
        ranks = self._detector.ranks
        all_leave = all(rank.dead or rank.record.has_left for rank in ranks)
        if 0 < limit < waited and not all_leave:
            self._noticed_leaving = True
            notice = self._compose(report.leaving_notice, ranks, leaving, waited)
            self._say(f"\nmpistrat: {notice}\n")


class Pauses:
    """Remembers when this node's ranks stood still, so that the time of a suspended job does not count as waiting."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._pauses: list[tuple[float, float]] = []  # (end, seconds)

    def notice(self, ranks: Collection[ObservedRank]) -> None:
        """Count the time since the last look as a pause if all living ranks stand still, or if it exceeds 2 s.

        A rank stands still if its process is stopped. More than 2 s mean that the observer was suspended, too.
        Called by: the observer, at each look.
        """
        gap = time.monotonic() - self._looked
        self.restart()
        alive = [rank for rank in ranks if not rank.dead]
        all_stand_still = alive and all(rank.stands_still for rank in alive)
        if all_stand_still or gap > deadlines.OBSERVER_STOOD_STILL:
            self._pauses.append((self._looked, gap))

    def restart(self) -> None:
        """Let the time since the last look begin now.

        Called by: the observer after a report, because it was busy and not suspended.
        """
        self._looked = time.monotonic()

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since `moment` (by `time.monotonic()`), less all pauses that ended after `moment`."""
        paused = sum(seconds for end, seconds in self._pauses if end > moment)
        return time.monotonic() - moment - paused


class ReportFile:
    """Writes the observer's report to a new file in another thread, because the file system may hang.

    The observer calls `write` once, and then `is_written` now and then. `is_written` returns True only once per report.
    Attributes: path: the file's path; "" until it is written, and if it cannot be written.
    """

    def __init__(self) -> None:
        self.path = ""
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        def write() -> None:
            self.path = write_report(text)

        self._thread = threading.Thread(target=write, daemon=True)
        self._thread.start()

    def is_written(self, seconds: float) -> bool:
        """Wait for the file, at most `seconds`.

        Returns: True in the first call that finds the file written. False before `write`, while the file is being
            written, if it could not be written, and in all calls after the file was reported.
        """
        if self._thread is None:
            return False
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._thread = None
        return bool(self.path)


def write_report(text: str) -> str:
    """Write `text` to a new file in the working directory, else in the folder for temporary files.

    Returns: the file's path; "" if neither folder can be written.
    """
    name = f"mpistrat-report-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for place in (".", tempfile.gettempdir()):
        with contextlib.suppress(OSError):  # the working directory may be gone
            path = os.path.abspath(os.path.join(place, name))
            with open(path, "x", encoding="utf-8", opener=private) as file:
                file.write(text)
            return path
    return ""


def _end_launcher(pid: int) -> None:
    """Kill the launcher `pid`, so that its exit code is not 0: by SIGHUP, and 0.2 s later by SIGKILL."""
    for number in (signal.SIGHUP, signal.SIGKILL):
        if is_launcher(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
            time.sleep(deadlines.OBSERVER_SLEEPS_BETWEEN_SIGNALS)


def main(path: str) -> None:
    """Observe the ranks with records in the job's folder `path`, until all have ended. The observer's process calls it.

    It returns at once if the folder does not exist, or if another process observes it.
    """
    # Signals that are sent to all processes of a job are meant for the ranks. The ranks may go on for a while after a
    # signal, and the observer must go on as long.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    import shutil  # noqa: F401 - removing the folder needs it, when a file system may hang

    with contextlib.suppress(FileNotFoundError):
        folder = JobFolder(path)
        with folder.alone("observer") as alone:
            if alone:
                Observer(folder).run()
