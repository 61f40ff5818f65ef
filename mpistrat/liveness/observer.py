"""The observer: one small process per node, which outlives the ranks that it watches by moments, and speaks for them.

It runs in a session of its own, where the launcher's clean-up does not reach it, and reads the path of the job's folder
from its standard input. It sleeps in epoll, which tells of deaths at once, and looks at the records twice a second.

It reports once, on stderr and in a file: a rank that dies without a word, or a collective that lasts longer than the
limit. Then it has the ranks end the job, and kills those that do not react. MPICH's launcher may still return 0 when a
rank ended by os._exit(0): then the observer kills it, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from mpistrat.liveness.failure_detector import (
    FailureDetector,
    Pauses,
    Wait,
    calls_differ,
    first_death,
    waits,
)
from mpistrat.liveness.job_folder import JobFolder, report_of
from mpistrat.liveness.other_accounts import Account, find_accounts
from mpistrat.liveness.processes import (
    DEAD,
    describe_exit,
    end_launcher,
    exit_code,
    launcher_of,
    state_of,
)
from mpistrat.liveness.record import END, ENDING, LEAVING, LEFT, RAISE
from mpistrat.liveness.report import death_report, leaving_notice, stall_report
from mpistrat.machine.notices import say
from mpistrat.machine.private_files import create, private

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_BE_READ = 0.2
SECONDS_TO_LEAVE_TOGETHER = 1.0  # ranks that all end with os._exit(0) have finished
SECONDS_FOR_OTHER_NODES = 3.0
SECONDS_TO_END_THE_JOB = 2.0
SECONDS_TO_END_BY_ITSELF = 10.0  # a rank that says that it ends the job
SECONDS_FOR_THE_LAUNCHER = 1.0  # to kill the others, when a rank has ended the job
SECONDS_FOR_THE_FIRST_NODE = 4.0  # its report speaks for the job
SECONDS_TO_REPORT = 15.0
SECONDS_TO_START = 60.0
SECONDS_FOR_A_LATE_RANK = 2.0


class Observer:
    """Judges what `FailureDetector` sees, reports it, and sees to it that the job ends."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._detector = FailureDetector(folder.path)
        self._pauses = Pauses()
        self._launcher: int | None = None  # where none is found
        self._reported = 0.0  # when; 0.0: nothing was reported
        self._ending_since = 0.0  # when a rank was seen to end the job
        self._killed = False
        self._leaving_since = 0.0  # when ranks were seen to wait at their end
        self._noticed_leaving = False

    def run(self) -> None:
        """Until no rank is left."""
        detector, alone_since = self._detector, time.monotonic()
        self._find_ranks()
        os.write(1, b"watching\n")
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # nobody reads further
        os.close(null)
        while not detector.all_are_dead or time.monotonic() - alone_since < self._patience():
            if not detector.all_are_dead:
                alone_since = time.monotonic()
            elif detector.ranks and self._folder.remove_if_last():
                break
            self._find_ranks()
            detector.wait(SECONDS_BETWEEN_LOOKS)
            self._pauses.notice(detector.ranks.values())
            self._judge_deaths()
            self._judge_waits()
            self._see_to_the_end()
            self._tell_who_waits_at_the_end()
        # MPICH's launcher returns the first one's.
        codes = [rank.status for rank in detector.unexplained()]
        if self._reported and self._launcher and (0 in codes or None in codes):
            time.sleep(SECONDS_TO_BE_READ)
            end_launcher(self._launcher)

    def _patience(self) -> float:
        """Somebody holds the folder: a rank that is about to make its record, or what a rank has forked."""
        return SECONDS_FOR_A_LATE_RANK if self._detector.ranks else SECONDS_TO_START

    def _find_ranks(self) -> None:
        for rank in self._detector.find():
            self._launcher = self._launcher or launcher_of(rank.pid)
        self._promise_to_look(0.0)

    def _promise_to_look(self, seconds: float) -> None:
        """The ranks trust in us until then, and some more."""
        for rank in self._detector.ranks.values():
            rank.record.looked = time.monotonic_ns() + int(seconds * 1e9)

    def _judge_deaths(self) -> None:
        detector = self._detector
        unexplained = detector.unexplained()
        if (
            not unexplained
            or self._reported
            or detector.in_state(ENDING)
            or self._is_reported_elsewhere()
        ):
            return
        if self._others_went_on() and all(rank.record.expendable for rank in unexplained):
            detector.let_go(unexplained)
            for rank in unexplained:  # the others say how many they are
                say(
                    f"\nmpistrat: {rank.who} {describe_exit(rank.status)}; the others go on without it\n"
                )
            return
        ranks = list(detector.ranks.values())
        # Before Linux 6.15 the exit status of a rank is forgotten as soon as its launcher has it.
        may_be_0 = all(rank.status in (0, None) for rank in unexplained)
        if detector.all_are_dead and may_be_0 and not calls_differ(ranks):
            return  # they all ended by os._exit(0), after the same calls
        if all(rank.status == 0 for rank in unexplained) and not detector.all_are_dead:
            missed = any(set(wait.missing) & set(unexplained) for wait in waits(ranks))
            if not missed and time.monotonic() - detector.first_died < SECONDS_TO_LEAVE_TOGETHER:
                return
        first = first_death(unexplained)
        self._report(lambda: death_report(ranks, first), END, exit_code(first.status))

    def _others_went_on(self) -> bool:
        """Whether there are ranks that live, here or on other nodes, or have come to their end by now."""
        ranks = list(self._detector.ranks.values())
        elsewhere = len(ranks) < ranks[0].record.size
        return elsewhere or any(not r.dead or r.record.state == LEFT for r in ranks)

    def _is_reported_elsewhere(self) -> bool:
        """Whether another node has just asked about a stall: what happens now is its doing."""
        asked = max((r.record.asked for r in self._detector.ranks.values()), default=0) / 1e9
        return asked > 0 and time.monotonic() - asked < SECONDS_TO_REPORT

    def _judge_waits(self) -> None:
        ranks = self._detector.going_on
        wait = next(iter(waits(ranks)), None)
        if self._reported or wait is None or any(rank.record.state == ENDING for rank in ranks):
            return
        record = wait.waiting[0].record
        grace = wait.first not in self._detector.ranks or self._is_reported_elsewhere()
        waited = self._pauses.seconds_since(wait.since / 1e9)
        if record.limit and waited > record.limit + SECONDS_FOR_THE_FIRST_NODE * grace:
            self._report(lambda: self._stall_report(wait, waited), record.on_stall, 1, wait)

    def _stall_report(self, wait: Wait, waited: float) -> str:
        accounts = self._ask_other_nodes(wait)
        missing = [rank for other in accounts for rank in other.missing(wait.group, wait.call)]
        lines = [line for other in accounts for line in other.lines]
        return stall_report(self._detector.going_on, wait, waited, missing, lines)

    def _ask_other_nodes(self, wait: Wait) -> list[Account]:
        if not wait.elsewhere:
            return []
        wait.waiting[0].record.ask = 1
        until = time.monotonic() + SECONDS_FOR_OTHER_NODES
        while time.monotonic() < until:
            accounts = find_accounts(self._folder.path)
            if accounts is not None:
                return accounts
            time.sleep(0.05)
        return []

    def _report(
        self, compose: Callable[[], str], action: int, code: int, wait: Wait | None = None
    ) -> None:
        """Say why the job ends, and end it; unless the ranks went on meanwhile."""
        text = self._compose(compose)
        if wait is not None and not wait.lasts():
            return
        end = "Ending the job." if action == END else "Raising StallError on the ranks that wait."
        written = write_report(f"{text}\n")
        with contextlib.suppress(OSError), create(report_of(self._folder.path)) as file:
            file.write(text)
        where = f" This report is in {written}." if written else ""
        say(f"\nmpistrat: {text}\nmpistrat: {end}{where}\n")
        self._reported = time.monotonic()
        for rank in self._detector.ranks.values():
            rank.record.code, rank.record.stalled = code, wait.group if wait else 0
            rank.record.abort = action  # last: the rank acts on it

    def _compose(self, compose: Callable[[], str]) -> str:
        """What `compose` returns, which may take a while: ranks are asked what they do."""
        self._promise_to_look(SECONDS_TO_REPORT)
        try:
            return compose()
        except Exception:  # the verdict stands, however little can be said
            return (
                f"ranks failed, or wait too long; why could not be told:\n{traceback.format_exc()}"
            )
        finally:
            self._pauses.restart()
            self._promise_to_look(0.0)

    def _see_to_the_end(self) -> None:
        """Kill the ranks that did not hear that the job ends, or could not end it."""
        now, ranks = time.monotonic(), self._detector.ranks.values()
        if not self._ending_since and self._detector.in_state(ENDING):
            self._ending_since = now
        ending = now - self._ending_since if self._ending_since else 0.0
        if ending > SECONDS_FOR_THE_LAUNCHER:
            # Under fault tolerant MPI, MPI_Abort ends one rank only.
            for record in (rank.record for rank in ranks):
                if not record.abort and record.state != ENDING:
                    record.code, record.abort = 1, END
        raised = any(rank.record.abort == RAISE for rank in ranks)
        unheard = self._reported and not raised and now - self._reported >= SECONDS_TO_END_THE_JOB
        if self._killed or not (unheard or ending > SECONDS_TO_END_BY_ITSELF):
            return
        self._killed = True
        for rank in ranks:
            if not rank.dead and state_of(rank.pid) not in DEAD:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _tell_who_waits_at_the_end(self) -> None:
        """Once. It may be right; or a rank waits, in an MPI call of the program's own, for one that is at its end."""
        ranks = list(self._detector.ranks.values())
        leaving = self._detector.in_state(LEAVING)
        if self._noticed_leaving or self._reported or not leaving:
            return
        self._leaving_since = self._leaving_since or time.monotonic()
        limit, waited = leaving[0].record.limit, self._pauses.seconds_since(self._leaving_since)
        if limit and waited > limit and any(not rank.dead and not rank.has_left for rank in ranks):
            self._noticed_leaving = True
            say(f"\nmpistrat: {self._compose(lambda: leaving_notice(ranks, waited))}\n")


def write_report(text: str) -> str:
    """The path of a new file in the working directory, else among the temporary ones; "" if neither can be written."""
    import tempfile  # here, because it makes importing mpistrat slower

    name = f"mpistrat-report-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for place in (".", tempfile.gettempdir()):
        with contextlib.suppress(OSError):  # the working directory may be gone
            path = os.path.abspath(os.path.join(place, name))
            with open(path, "x", encoding="utf-8", opener=private) as file:
                file.write(text)
            return path
    return ""


def main() -> None:
    # What is sent to all processes of a job is for the ranks, which may go on for a while; it ends with them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    path = sys.stdin.readline().rstrip("\n")
    if path:  # else the process that started us has ended
        with contextlib.suppress(FileNotFoundError):
            Observer(JobFolder(path)).run()


if __name__ == "__main__":
    main()
