"""The observer: one small process per node, which outlives the ranks that it watches by moments, and speaks for them.

It runs in a session of its own, where the launcher's clean-up does not reach it, and holds no descriptor of the
launcher's. It sleeps in epoll, which tells of deaths at once, and looks at the records twice a second, more often at
the start.

It reports once, on a rank's stderr and in a file: a rank that dies without a word, a collective that lasts longer than
the limit, or a rank that has ended while others wait for it to start. It speaks, and has the ranks end the job, before
it writes the file: the file system may be what hangs. It kills ranks that do not react. MPICH's launcher may still
return 0 when a rank ended by os._exit(0): then the observer kills it, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from mpistrat.liveness import deadlines
from mpistrat.liveness.bounded_waits import soon, within
from mpistrat.liveness.call_site import places_of
from mpistrat.liveness.observer import failure_detector, report
from mpistrat.liveness.observer.failure_detector import FailureDetector, ObservedRank, Wait
from mpistrat.liveness.observer.node_accounts import Account, find_accounts, forget_accounts
from mpistrat.liveness.observer.pauses import Pauses
from mpistrat.liveness.observer.stderr_proxy import StderrProxy
from mpistrat.liveness.processes import DEAD, describe_exit, exit_code, is_launcher, launcher_of
from mpistrat.liveness.records.job_folder import JobFolder, report_of, words_of
from mpistrat.liveness.records.record import ANNOUNCED, END, ENDING, LEAVING, RAISE, SEEN
from mpistrat.machine.private_files import create, private

_OUTCOMES = {END: "Ending the job.", RAISE: "Raising StallError on the ranks that wait."}


class Observer:
    """Judges what `FailureDetector` sees, reports it, and sees to it that the job ends."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._started = time.monotonic()
        self._detector = FailureDetector(folder.path, self._be_ready_to_speak)
        self._pauses = Pauses()
        self._launcher: int | None = None  # where none is found
        self._stderr = StderrProxy()
        self._report_file = ReportFile()
        self._reported = 0.0  # when; 0.0: nothing was reported
        self._ending_since = math.inf  # when a rank was seen to end the job; infinite: not yet
        self._killed = False
        # Likewise, when ranks at their end were seen, while others wait for all to start.
        self._absent_since = math.inf
        self._leaving_since = math.inf  # likewise, when ranks were seen to wait at their end
        self._noticed_leaving = False
        self._has_noticed_wait = False

    def run(self) -> None:
        """Until no rank is left, and none is still to start."""
        detector, alone_since = self._detector, time.monotonic()
        while not detector.all_are_dead or time.monotonic() - alone_since < self._patience():
            self._look()
            if not detector.all_are_dead or self._others_may_start():
                alone_since = time.monotonic()
            elif detector.ranks and self._folder.remove_if_last():
                break
        self._tell_where_the_report_is(deadlines.OBSERVER_WAITS_FOR_REPORT_FILE_AT_END)
        if self._reported and self._launcher and self._may_return_0():
            # It reads what is said there, and waits for the end of that.
            if self._stderr.owner != self._launcher:
                time.sleep(deadlines.OBSERVER_WAITS_FOR_LAUNCHER_TO_READ)
            _end_launcher(self._launcher)
        self._stderr.give_back()

    def _look(self) -> None:
        self._find_ranks()
        for rank in self._detector.ranks.values():
            rank.record.observer = os.getpid()
        is_new = time.monotonic() - self._started < deadlines.OBSERVER_IS_NEW
        pause = deadlines.OBSERVER_SLEEPS_AT_START if is_new else deadlines.OBSERVER_SLEEPS
        self._detector.wait(pause)
        self._pauses.notice(self._detector.ranks.values())
        self._speak_for_ranks()
        self._judge_starts()
        self._judge_deaths()
        self._judge_waits()
        self._see_to_the_end()
        self._tell_who_waits_at_the_end()
        self._tell_where_the_report_is(0.0)

    def report_stall(self) -> None:
        """If there is one. Called by: a rank, where no observer runs."""
        self._find_ranks()
        self._judge_waits()
        self._tell_where_the_report_is(deadlines.OBSERVER_WAITS_FOR_REPORT_FILE_AT_END)

    def _patience(self) -> float:
        """Somebody holds the folder: a rank that is about to make its record, or what a rank has forked."""
        if self._detector.ranks:
            return deadlines.OBSERVER_WAITS_FOR_LATE_RANK
        return deadlines.OBSERVER_WAITS_FOR_FIRST_RANK

    def _others_may_start(self) -> bool:
        """Whether ranks may be still to start: they have to be told of the ranks that have ended."""
        dead_for = time.monotonic() - self._detector.first_died
        is_early = dead_for < deadlines.OBSERVER_WAITS_FOR_OTHERS_TO_START and not self._reported
        return is_early and failure_detector.others_may_start(self._detector.ranks.values())

    def _find_ranks(self) -> None:
        for rank in self._detector.find():
            self._launcher = self._launcher or launcher_of(rank.pid)
            self._killed = False  # if the job is being ended, a rank that comes late is killed, too
        self._promise_to_look(0.0)

    def _speakers(self) -> Iterator[int]:
        """The processes whose stderr may be used, those of ranks first."""
        yield from (rank.pid for rank in self._detector.ranks.values() if not rank.dead)
        if self._launcher is not None:
            yield self._launcher

    def _be_ready_to_speak(self, ending: ObservedRank) -> None:
        """The launcher kills the other ranks in a moment, and ends when nobody holds their stderr."""
        if not ending.ended_well or ending.record.say:
            self._stderr.borrow(self._speakers())
        if ending.record.exits == ANNOUNCED:
            ending.record.exits = SEEN

    def _say(self, text: str) -> None:
        within(deadlines.OBSERVER_WAITS_FOR_WRITE, lambda: self._stderr.say(text, self._speakers()))

    def _speak_for_ranks(self) -> None:
        """For those that have no stderr of their own."""
        for rank in self._detector.ranks.values():
            if rank.record.say:
                words = words_of(self._folder.path, rank.number)
                with contextlib.suppress(OSError), open(words, encoding="utf-8") as file:
                    self._say(file.read())
                rank.record.say = 0

    def _promise_to_look(self, seconds: float) -> None:
        """The ranks trust in us until then, and some more."""
        for rank in self._detector.ranks.values():
            rank.record.looked = time.monotonic_ns() + int(seconds * 1e9)

    @property
    def _is_explained(self) -> bool:
        """Whether this observer, or a rank, has said why the job ends."""
        return bool(self._reported or self._detector.in_state(ENDING))

    def _judge_starts(self) -> None:
        """Ranks that wait for all ranks to start wait in vain for those that have come to their ends."""
        waiting = self._detector.starting
        absent = [rank for rank in self._detector.ranks.values() if rank.has_ended]
        if not (waiting and absent) or self._is_explained:
            self._absent_since = math.inf
            return
        self._absent_since = min(self._absent_since, time.monotonic())
        # Open MPI's launcher ends the job then, without a word about why the others die.
        ended_by_launcher = any(rank.dead for rank in waiting)
        absent_for = time.monotonic() - self._absent_since
        if ended_by_launcher or absent_for > deadlines.OBSERVER_WAITS_FOR_ABSENT_RANKS:
            self._report(functools.partial(report.absence_report, absent, waiting), END, 1)

    def _judge_deaths(self) -> None:
        detector = self._detector
        unexplained = detector.unexplained()
        if not unexplained or self._is_explained or self._is_reported_elsewhere():
            return
        if detector.others_may_go_on() and all(rank.record.expendable for rank in unexplained):
            for rank in unexplained:  # the others say how many they are
                rank.lost, detector.first_died = True, 0.0
                how = describe_exit(rank.status)
                self._say(f"\nmpistrat: {rank.who} {how}; the others go on without it\n")
        elif not detector.exited_together(unexplained):
            first, ranks = failure_detector.first_death(unexplained), [*detector.ranks.values()]
            compose = functools.partial(report.death_report, ranks, first)
            self._report(compose, END, exit_code(first.status))

    def _is_reported_elsewhere(self) -> bool:
        """Whether another node has just asked about a stall: what happens now is its doing."""
        asked = max((r.record.asked for r in self._detector.ranks.values()), default=0) / 1e9
        return asked > 0 and time.monotonic() - asked < deadlines.OBSERVER_REPORTS

    def _judge_waits(self) -> None:
        ranks = self._detector.going_on
        if self._is_explained or any(rank.record.abort for rank in ranks):
            return  # a rank says why; or one did in our place, or another node
        for wait in failure_detector.waits(ranks):
            grace = wait.slot.first not in self._detector.ranks or self._is_reported_elsewhere()
            waited = self._pauses.seconds_since(wait.since / 1e9)
            overdue = waited - deadlines.OBSERVER_WAITS_FOR_FIRST_NODE * grace
            if 0 < wait.limit < overdue:
                compose = functools.partial(self._stall_report, wait, waited)
                self._report(compose, wait.waiting[0].record.on_stall, 1, wait)
                return
            if wait.timeout and not wait.noticed:
                self._notice_wait(wait, waited, overdue)

    def _notice_wait(self, wait: Wait, waited: float, overdue: float) -> None:
        """Say who is missing, and end nothing: once when a wait is long, and when the ranks are to raise an error."""
        limit = wait.waiting[0].record.limit
        passed = overdue > wait.timeout
        is_long = not self._has_noticed_wait and 0 < limit < overdue
        if not (passed or is_long):
            return
        if not self._is_reported_elsewhere():
            text = self._compose(functools.partial(self._stall_report, wait, waited))
            if not wait.lasts():
                return
            end = _OUTCOMES[RAISE] if passed else "They go on waiting until then."
            self._say(f"\nmpistrat: {text}\nmpistrat: {end}\n")
        self._has_noticed_wait = True
        if passed:
            for rank, slot in wait.inside.items():
                rank.record.noticed = slot.entry

    def _stall_report(self, wait: Wait, waited: float) -> str:
        accounts = self._ask_other_nodes(wait)
        call = wait.slot.group, wait.slot.calls, wait.members
        missing = itertools.chain.from_iterable(other.missing(*call) for other in accounts)
        lines = [*itertools.chain.from_iterable(other.lines for other in accounts)]
        return report.stall_report(self._detector.going_on, wait, waited, missing, lines)

    def _ask_other_nodes(self, wait: Wait) -> list[Account]:
        if not wait.elsewhere:
            return []
        path = self._folder.path
        forget_accounts(path)
        wait.waiting[0].record.ask = 1
        soon(lambda: find_accounts(path) is not None, deadlines.OBSERVER_WAITS_FOR_OTHER_NODES)
        return find_accounts(path) or []

    def _report(
        self, compose: Callable[[], str], action: int, code: int, wait: Wait | None = None
    ) -> None:
        """Say why the job ends, and end it; unless the ranks went on meanwhile."""
        text = self._compose(compose)
        if wait is not None and not wait.lasts():
            return
        self._say(f"\nmpistrat: {text}\nmpistrat: {_OUTCOMES[action]}\n")
        if action == RAISE:  # with this text
            with contextlib.suppress(OSError), create(report_of(self._folder.path)) as file:
                file.write(text)
        self._reported = time.monotonic()
        for rank in self._detector.ranks.values():
            rank.record.code, rank.record.stalled = code, wait.slot.group if wait else 0
            rank.record.abort = action  # last: the rank acts on it
        self._report_file.write(f"{text}\n")
        self._tell_where_the_report_is(deadlines.OBSERVER_WAITS_FOR_REPORT_FILE)

    def _may_return_0(self) -> bool:
        """Whether a rank may have returned 0 without a word: MPICH's launcher may then return 0, too."""
        exits = any(rank.record.exits for rank in self._detector.ranks.values())
        return exits or any(rank.status in (0, None) for rank in self._detector.unexplained())

    def _tell_where_the_report_is(self, seconds: float) -> None:
        """Once it is written; until then, but not for long, the launcher is kept: to the end, if it would return 0."""
        if self._report_file.is_written(seconds):
            self._say(f"mpistrat: This report is in {self._report_file.path}.\n")
        elif time.monotonic() - self._reported < deadlines.OBSERVER_WAITS_FOR_REPORT_FILE_AT_END:
            return
        if not self._may_return_0():
            self._stderr.give_back()

    def _compose(self, compose: Callable[[], str]) -> str:
        """What `compose` returns, which may take a while: ranks are asked what they do."""
        self._promise_to_look(deadlines.OBSERVER_REPORTS)
        try:
            return compose()
        except Exception as error:  # the verdict stands, however little can be said
            places = "".join(f"\n      {place}" for place in places_of(error))
            return f"ranks failed, or wait too long; {error!r} kept the observer from telling why:{places}"
        finally:
            self._pauses.restart()
            self._promise_to_look(0.0)

    def _see_to_the_end(self) -> None:
        """Kill the ranks that did not hear that the job ends, or could not end it."""
        now = time.monotonic()
        if self._detector.in_state(ENDING):
            self._ending_since = min(self._ending_since, now)
        ending = now - self._ending_since
        if ending > deadlines.OBSERVER_WAITS_FOR_LAUNCHER:
            # Under fault tolerant MPI, MPI_Abort ends one rank only; and before MPI_Init, an exit code no other.
            for rank in self._detector.ranks.values():
                if not rank.record.abort and rank.record.state != ENDING:
                    rank.record.code, rank.record.abort = 1, END
        if not self._killed and (self._is_unheard(now) or ending > self._patience_with_ending()):
            self._killed = True
            for rank in self._detector.ranks.values():
                if rank.letter not in DEAD:
                    with contextlib.suppress(OSError):
                        os.kill(rank.pid, signal.SIGKILL)

    def _is_unheard(self, now: float) -> bool:
        """Whether ranks have had the time to end since they were told to."""
        raised = any(rank.record.abort == RAISE for rank in self._detector.ranks.values())
        told_for = now - (self._reported or now)
        return told_for >= deadlines.OBSERVER_WAITS_FOR_TOLD_RANKS and not raised

    def _patience_with_ending(self) -> float:
        if all(rank.dead for rank in self._detector.in_state(ENDING)):  # the others were told
            return deadlines.OBSERVER_WAITS_FOR_TOLD_RANKS + deadlines.OBSERVER_WAITS_FOR_LAUNCHER
        return deadlines.OBSERVER_WAITS_FOR_ENDING_RANK

    def _tell_who_waits_at_the_end(self) -> None:
        """Once. It may be right; or a rank waits, in an MPI call of the program's own, for one that is at its end."""
        ranks, leaving = list(self._detector.ranks.values()), self._detector.in_state(LEAVING)
        if self._noticed_leaving or self._reported or not leaving:
            return
        self._leaving_since = min(self._leaving_since, time.monotonic())
        limit, waited = leaving[0].record.limit, self._pauses.seconds_since(self._leaving_since)
        if 0 < limit < waited and not all(rank.dead or rank.record.has_left for rank in ranks):
            self._noticed_leaving = True
            notice = self._compose(functools.partial(report.leaving_notice, ranks, leaving, waited))
            self._say(f"\nmpistrat: {notice}\n")


class ReportFile:
    """A report, written by a thread of its own. `path` is "" where it cannot be written."""

    def __init__(self) -> None:
        self.path = ""
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        def write() -> None:
            self.path = write_report(text)

        self._thread = threading.Thread(target=write, daemon=True)
        self._thread.start()

    def is_written(self, seconds: float) -> bool:
        """Whether it is there, after at most so long. True once."""
        if self._thread is None:
            return False
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._thread = None
        return bool(self.path)


def write_report(text: str) -> str:
    """The path of a new file in the working directory, else among the temporary ones; "" if neither can be written."""
    name = f"mpistrat-report-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for place in (".", tempfile.gettempdir()):
        with contextlib.suppress(OSError):  # the working directory may be gone
            path = os.path.abspath(os.path.join(place, name))
            with open(path, "x", encoding="utf-8", opener=private) as file:
                file.write(text)
            return path
    return ""


def _end_launcher(pid: int) -> None:
    """Kill it, so that its exit code is not 0."""
    for number in (signal.SIGHUP, signal.SIGKILL):
        if is_launcher(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
            time.sleep(deadlines.OBSERVER_SLEEPS_BETWEEN_SIGNALS)


def main(path: str) -> None:
    """Observe the ranks whose records lie in a job's folder."""
    # What is sent to all processes of a job is for the ranks, which may go on for a while; it ends with them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    import shutil  # noqa: F401 - removing the folder needs it, when a file system may hang

    with contextlib.suppress(FileNotFoundError):
        folder = JobFolder(path)
        with folder.alone("observer") as alone:
            if alone:
                Observer(folder).run()
