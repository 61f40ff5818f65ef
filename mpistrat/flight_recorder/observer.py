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
import tempfile
import time

from mpistrat.flight_recorder.elsewhere import Account, find_accounts
from mpistrat.flight_recorder.job_folder import JobFolder, report_of
from mpistrat.flight_recorder.processes import (
    DEAD,
    exit_status,
    launcher_of,
    open_pidfd,
    state_of,
)
from mpistrat.flight_recorder.record import (
    ABORT,
    ASK,
    CODE,
    END,
    ENDING,
    LIMIT,
    ON_STALL,
    RAISE,
    RUNNING,
    STATE,
)
from mpistrat.flight_recorder.report import (
    Rank,
    Wait,
    death_report,
    find_ranks,
    stall_report,
    waits,
)

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_DIE_TOGETHER = (
    0.4  # a launcher kills the others while the first may still write its core
)
SECONDS_TO_BE_READ = 0.2
SECONDS_TO_LEAVE_TOGETHER = 1.0  # ranks that all end with os._exit(0) have finished
SECONDS_FOR_OTHER_NODES = 3.0
SECONDS_TO_END_THE_JOB = 2.0
SECONDS_FOR_THE_FIRST_NODE = 4.0  # its report speaks for the job
_KILLS = (signal.SIGKILL, signal.SIGTERM)


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
        self._failed: Rank | None = None
        self._reported = 0.0
        self._killed = False

    def run(self) -> None:
        """Until no rank is left."""
        started = time.monotonic()
        self._find_ranks()
        os.write(1, b"watching\n")
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # nobody reads further
        os.close(null)
        while not self._ranks or len(self._deaths) < len(self._ranks):
            self._find_ranks()
            self._wait_for_deaths(SECONDS_BETWEEN_LOOKS)
            self._wait_for_deaths_of_one_moment()
            self._judge_deaths()
            self._judge_waits()
            self._see_to_the_end()
            if not self._ranks and time.monotonic() - started > 60:
                break
        if self._failed is not None and self._failed.status in (0, None) and self._launcher:
            time.sleep(SECONDS_TO_BE_READ)
            _end_launcher(self._launcher)
        self._folder.remove()

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

    def _judge_deaths(self) -> None:
        states = [rank.record.words[STATE] for rank in self._ranks.values()]
        unexplained = [rank for rank in self._deaths if rank.record.words[STATE] == RUNNING]
        if not unexplained or self._reported or ENDING in states:
            return
        if all(rank.status == 0 for rank in unexplained):
            if len(self._deaths) == len(self._ranks) and not self._unequal():
                return  # they all ended by os._exit(0), after the same calls
            missed = any(
                set(wait.missing) & set(unexplained) for wait in waits(list(self._ranks.values()))
            )
            waiting = time.monotonic() - self._first_death < SECONDS_TO_LEAVE_TOGETHER
            if not missed and waiting and len(self._deaths) < len(self._ranks):
                return
        first = _first(unexplained)
        self._failed = first
        self._report(death_report(list(self._ranks.values()), first), END, _code(first.status))

    def _unequal(self) -> bool:
        calls: dict[int, set[int]] = {}
        for rank in self._ranks.values():
            for board in rank.record.boards():
                calls.setdefault(board.group, set()).add(board.calls)
        return any(len(numbers) > 1 for numbers in calls.values())

    def _judge_waits(self) -> None:
        if self._reported or any(
            rank.record.words[STATE] == ENDING for rank in self._ranks.values()
        ):
            return
        ranks = list(self._ranks.values())
        for wait in waits(ranks)[:1]:
            limit = wait.waiting[0].record.words[LIMIT] / 1e9
            grace = 0.0 if 0 in self._ranks else SECONDS_FOR_THE_FIRST_NODE
            if limit and (time.monotonic_ns() - wait.since) / 1e9 > limit + grace:
                action = wait.waiting[0].record.words[ON_STALL]
                told = self._ask_other_nodes(wait)
                missing = [rank for one in told for rank in one.missing(wait.group, wait.call)]
                lines = [line for one in told for line in one.lines]
                self._report(stall_report(ranks, wait, limit, missing, lines), action, 1)

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

    def _report(self, text: str, action: int, code: int) -> None:
        end = "Ending the job." if action == END else "Raising StallError on the ranks that wait."
        written = _write_file(f"{text}\n")
        with (
            contextlib.suppress(OSError),
            open(report_of(self._folder.path), "w", encoding="utf-8") as file,
        ):
            file.write(text)
        where = f" This report is in {written}." if written else ""
        _say(f"\nmpistrat: {text}\nmpistrat: {end}{where}\n")
        self._reported = time.monotonic()
        for rank in self._ranks.values():
            rank.record.words[CODE] = code
            rank.record.words[ABORT] = action
            if action == RAISE:
                rank.record.words[ON_STALL] = RAISE

    def _see_to_the_end(self) -> None:
        """Kill the ranks that did not hear that the job ends."""
        if (
            not self._reported
            or self._killed
            or time.monotonic() - self._reported < SECONDS_TO_END_THE_JOB
        ):
            return
        if any(rank.record.words[ABORT] == RAISE for rank in self._ranks.values()):
            return
        self._killed = True
        for rank in self._ranks.values():
            if not rank.dead and state_of(rank.pid) not in DEAD:
                with contextlib.suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)


def _first(deaths: list[Rank]) -> Rank:
    """Whose death was the cause of the others', which the launcher may have killed in its clean-up.

    Under load the kernel may tell of one of those first: a process closes its connection to the launcher a while
    before it counts as dead. Those that were killed in a collective which another had not entered were waiting.
    """
    own_end = [
        rank for rank in deaths if rank.status is not None and rank.status & 0x7F not in _KILLS
    ]
    missing = [
        rank
        for rank in deaths
        if any(rank in wait.missing for wait in waits(deaths, of_the_dead=True))
    ]
    return (own_end or missing or deaths)[0]


def _code(status: int | None) -> int:
    """What a shell would say of a process with this wait status; never 0."""
    if status is None:
        return 1
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status) or 1


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _write_file(text: str) -> str:
    """The path of a new file in the working directory, else among the temporary ones; "" if neither can be written."""
    name = f"mpistrat-report-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for place in (os.getcwd(), tempfile.gettempdir()):
        path = os.path.join(place, name)
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(text)
            return path
    return ""


def _end_launcher(pid: int) -> None:
    """Its exit code must not be 0: no rank is left that could see to that."""
    for number in (signal.SIGHUP, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.kill(pid, number)
        time.sleep(0.2)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path = sys.stdin.readline().rstrip("\n")
    if path:  # else the process that started us has ended
        with contextlib.suppress(FileNotFoundError):
            Observer(JobFolder(path)).run()


if __name__ == "__main__":
    main()
