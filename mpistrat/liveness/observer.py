"""The observer: one small process per node, which outlives the ranks it watches by moments and speaks for them.

It runs in a session of its own, where the launcher's clean-up does not reach it, and reads the path of the job's folder
from its standard input. It sleeps in epoll, which tells of deaths at once, and looks at the records twice a second.

A rank that dies without having said so, or a collective that lasts longer than the limit, is reported once: on stderr
and in a file. Then the ranks are told to end the job; those that cannot hear are killed. MPICH's launcher may
still return 0 when a rank ended by os._exit(0): then it is killed too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable

from mpistrat.liveness.job_folder import JobFolder, report_of
from mpistrat.liveness.other_accounts import Account, find_accounts
from mpistrat.liveness.processes import (
    DEAD,
    describe_exit,
    end_launcher,
    exit_code,
    exit_status,
    launcher_of,
    open_pidfd,
    state_of,
)
from mpistrat.liveness.record import (
    ABORT,
    ASK,
    ASKED,
    CODE,
    END,
    ENDING,
    EXPENDABLE,
    LEAVING,
    LEFT,
    LIMIT,
    LOOKED,
    ON_STALL,
    RAISE,
    RUNNING,
    SIZE,
    STALLED,
    STATE,
)
from mpistrat.liveness.report import (
    Rank,
    Wait,
    death_report,
    find_ranks,
    first_death,
    leaving_notice,
    stall_report,
    waits,
)
from mpistrat.machine.private_files import create, private

SECONDS_BETWEEN_LOOKS = 0.5
# Longer than this between two looks, and the machine or this process stood still.
SECONDS_OF_A_PAUSE = 2.0
# A launcher kills the others while the first may still write its core.
SECONDS_TO_DIE_TOGETHER = 0.4
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
    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._ranks: dict[int, Rank] = {}  # by number
        self._by_pidfd: dict[int, Rank] = {}
        self._without_pidfd: list[Rank] = []
        self._deaths: list[Rank] = []  # in their order, as epoll reports events
        self._first_death = 0.0
        self._epoll = select.epoll()
        self._launcher: int | None = None
        self._reported = 0.0
        self._killed = False
        self._ending_since = 0.0
        self._leaving_since: float | None = 0.0  # None once it was told
        self._looked = time.monotonic()
        self._pauses: list[tuple[float, float]] = []  # (end, seconds)

    def run(self) -> None:
        """Until no rank is left."""
        started = time.monotonic()
        self._find_ranks()
        os.write(1, b"watching\n")
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # nobody reads further
        os.close(null)
        alone_since = started
        while not self._nobody_is_left() or time.monotonic() - alone_since < self._patience():
            if not self._nobody_is_left():
                alone_since = time.monotonic()
            elif self._ranks and self._folder.remove_if_last():
                break
            self._find_ranks()
            self._wait_for_deaths(SECONDS_BETWEEN_LOOKS)
            self._wait_for_deaths_of_one_moment()
            self._notice_pauses()
            self._judge_deaths()
            self._judge_waits()
            self._see_to_the_end()
            self._tell_who_waits_at_the_end()
        # MPICH's launcher returns the first one's.
        codes = [rank.status for rank in self._unexplained_deaths()]
        if self._reported and self._launcher and (0 in codes or None in codes):
            time.sleep(SECONDS_TO_BE_READ)
            end_launcher(self._launcher)

    def _nobody_is_left(self) -> bool:
        return len(self._deaths) == len(self._ranks)

    def _patience(self) -> float:
        """Somebody holds the folder: a rank that is about to make its record, or what a rank has forked."""
        return SECONDS_FOR_A_LATE_RANK if self._ranks else SECONDS_TO_START

    def _find_ranks(self) -> None:
        for rank in find_ranks(self._folder.path, known=self._ranks):
            self._ranks[rank.number] = rank
            try:
                pidfd = open_pidfd(rank.pid)
            except ProcessLookupError:
                self._dies(rank, None)
            except OSError:
                self._without_pidfd.append(rank)
            else:
                self._by_pidfd[pidfd] = rank
                self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLET)
            if self._launcher is None:
                self._launcher = launcher_of(rank.pid)
        self._promise_to_look(0.0)

    def _promise_to_look(self, seconds: float) -> None:
        """The ranks trust in us until then, and some more."""
        for rank in self._ranks.values():
            rank.record.words[LOOKED] = time.monotonic_ns() + int(seconds * 1e9)

    def _wait_for_deaths(self, seconds: float) -> None:
        for pidfd, _ in self._epoll.poll(seconds):
            rank = self._by_pidfd[pidfd]
            if not rank.dead:
                self._dies(rank, exit_status(rank.pid, pidfd))
            elif rank.status is None:  # a second event, when it was reaped
                rank.status = exit_status(rank.pid, pidfd)
        for rank in self._without_pidfd:
            if not rank.dead and state_of(rank.pid) in DEAD:
                self._dies(rank, exit_status(rank.pid, None))

    def _dies(self, rank: Rank, status: int | None) -> None:
        rank.dead, rank.status = True, status
        self._deaths.append(rank)
        self._first_death = self._first_death or time.monotonic()

    def _wait_for_deaths_of_one_moment(self) -> None:
        until = self._first_death + SECONDS_TO_DIE_TOGETHER
        while self._deaths and len(self._deaths) < len(self._ranks):
            left = until - time.monotonic()
            if left <= 0:
                return
            self._wait_for_deaths(left)

    def _notice_pauses(self) -> None:
        """A suspended job has not waited meanwhile: the clock went on, or this process did, but no rank could."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        alive = [rank for rank in self._ranks.values() if not rank.dead]
        stopped = alive and all(rank.stands_still for rank in alive)
        if gap > SECONDS_OF_A_PAUSE or stopped:
            self._pauses.append((now, gap))

    def _seconds_since(self, moment: float) -> float:
        """Without pauses."""
        pauses = sum(seconds for end, seconds in self._pauses if end > moment)
        return time.monotonic() - moment - pauses

    def _judge_deaths(self) -> None:
        states = [rank.record.words[STATE] for rank in self._ranks.values()]
        unexplained = self._unexplained_deaths()
        if not unexplained or self._reported or ENDING in states or self._is_told_elsewhere():
            return
        if self._others_went_on() and all(r.record.words[EXPENDABLE] for r in unexplained):
            self._let_go(unexplained)
            return
        all_dead = self._nobody_is_left()
        # Before Linux 6.15 the exit status of a rank is forgotten as soon as its launcher has it.
        may_be_0 = all(rank.status in (0, None) for rank in unexplained)
        if all_dead and may_be_0 and not self._unequal():
            return  # they all ended by os._exit(0), after the same calls
        if all(rank.status == 0 for rank in unexplained):
            missed = any(
                set(wait.missing) & set(unexplained) for wait in waits(list(self._ranks.values()))
            )
            waiting = time.monotonic() - self._first_death < SECONDS_TO_LEAVE_TOGETHER
            if not missed and waiting and not all_dead:
                return
        first = first_death(unexplained)
        ranks = list(self._ranks.values())
        self._report(lambda: death_report(ranks, first), END, exit_code(first.status))

    def _others_went_on(self) -> bool:
        """Whether there are ranks that live, here or on other nodes, or have come to their end by now."""
        ranks = self._ranks.values()
        elsewhere = len(ranks) < next(iter(ranks)).record.words[SIZE]
        return elsewhere or any(not r.dead or r.record.words[STATE] == LEFT for r in ranks)

    def _let_go(self, lost: list[Rank]) -> None:
        """The other ranks go on without them; one of these tells with how many."""
        for rank in lost:
            rank.lost = True
            _say(
                f"\nmpistrat: {rank.who} {describe_exit(rank.status)}; the others go on without it\n"
            )
        self._first_death = 0.0

    def _is_told_elsewhere(self) -> bool:
        """Whether another node has just asked about a stall: what happens now is its doing."""
        asked = max((rank.record.words[ASKED] for rank in self._ranks.values()), default=0) / 1e9
        return asked > 0 and time.monotonic() - asked < SECONDS_TO_REPORT

    def _unexplained_deaths(self) -> list[Rank]:
        return [
            rank
            for rank in self._deaths
            if rank.record.words[STATE] in (RUNNING, LEAVING) and not rank.lost
        ]

    def _unequal(self) -> bool:
        """Whether ranks made different numbers of calls, or died in one."""
        calls: dict[int, set[int]] = {}
        for rank in self._ranks.values():
            for board in rank.record.boards():
                calls.setdefault(board.group, set()).add(board.calls)
        inside = any(rank.inside for rank in self._ranks.values())
        return inside or any(len(numbers) > 1 for numbers in calls.values())

    def _judge_waits(self) -> None:
        ranks = [rank for rank in self._ranks.values() if not rank.lost]
        if self._reported or any(rank.record.words[STATE] == ENDING for rank in ranks):
            return
        wait = next(iter(waits(ranks)), None)
        if wait is None:
            return
        words = wait.waiting[0].record.words
        limit = words[LIMIT] / 1e9
        grace = wait.first not in self._ranks or self._is_told_elsewhere()
        waited = self._seconds_since(wait.since / 1e9)
        if limit and waited > limit + SECONDS_FOR_THE_FIRST_NODE * grace:
            self._report(lambda: self._stall_report(wait, waited, limit), words[ON_STALL], 1, wait)

    def _stall_report(self, wait: Wait, waited: float, limit: float) -> str:
        told = self._ask_other_nodes(wait)
        missing = [rank for one in told for rank in one.missing(wait.group, wait.call)]
        lines = [line for one in told for line in one.lines]
        ranks = [rank for rank in self._ranks.values() if not rank.lost]
        return stall_report(ranks, wait, waited, limit, missing, lines)

    def _ask_other_nodes(self, wait: Wait) -> list[Account]:
        if not wait.elsewhere:
            return []
        wait.waiting[0].record.words[ASK] = 1
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
        self._promise_to_look(SECONDS_TO_REPORT)
        try:
            text = compose()
        except Exception:  # the verdict stands, however little can be said
            text = (
                f"ranks failed, or wait too long; why could not be told:\n{traceback.format_exc()}"
            )
        self._looked = time.monotonic()
        self._promise_to_look(0.0)
        if wait is not None and not wait.lasts():
            return
        end = "Ending the job." if action == END else "Raising StallError on the ranks that wait."
        written = write_report(f"{text}\n")
        with contextlib.suppress(OSError), create(report_of(self._folder.path)) as file:
            file.write(text)
        where = f" This report is in {written}." if written else ""
        _say(f"\nmpistrat: {text}\nmpistrat: {end}{where}\n")
        self._reported = time.monotonic()
        for rank in self._ranks.values():
            rank.record.words[CODE] = code
            rank.record.words[STALLED] = wait.group if wait else 0
            rank.record.words[ABORT] = action

    def _see_to_the_end(self) -> None:
        """Kill the ranks that did not hear that the job ends, or could not end it."""
        records = [rank.record for rank in self._ranks.values()]
        now = time.monotonic()
        if not self._ending_since and any(record.words[STATE] == ENDING for record in records):
            self._ending_since = now
        if self._ending_since and now - self._ending_since > SECONDS_FOR_THE_LAUNCHER:
            # Under fault tolerant MPI, MPI_Abort ends one rank only.
            for record in records:
                if not record.words[ABORT] and record.words[STATE] != ENDING:
                    record.words[CODE], record.words[ABORT] = 1, END
        too_long = self._ending_since and now - self._ending_since > SECONDS_TO_END_BY_ITSELF
        raised = any(record.words[ABORT] == RAISE for record in records)
        heard = not self._reported or raised or now - self._reported < SECONDS_TO_END_THE_JOB
        if self._killed or (heard and not too_long):
            return
        self._killed = True
        for rank in self._ranks.values():
            if not rank.dead and state_of(rank.pid) not in DEAD:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _tell_who_waits_at_the_end(self) -> None:
        """Once: that may be right, or a rank waits for one of those in an MPI call of the program's own."""
        ranks = list(self._ranks.values())
        leaving = [rank for rank in ranks if rank.record.words[STATE] == LEAVING]
        if self._leaving_since is None or self._reported or not leaving:
            return
        now = time.monotonic()
        self._leaving_since = self._leaving_since or now
        limit = leaving[0].record.words[LIMIT] / 1e9
        waited = self._seconds_since(self._leaving_since)
        running = [rank for rank in ranks if not rank.dead and not rank.has_left]
        if limit and running and waited > limit:
            self._leaving_since = None
            self._promise_to_look(SECONDS_TO_REPORT)
            _say(f"\nmpistrat: {leaving_notice(ranks, waited)}\n")
            self._looked = time.monotonic()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


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
