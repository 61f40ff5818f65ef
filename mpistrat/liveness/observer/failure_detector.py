"""`FailureDetector`: finds ranks of this node that are dead, or wait for other ranks.

The kernel reports deaths by a pidfd of each rank, and closed files by the end of a FIFO ("line") that each rank holds
open. The ranks' records show the ranks that have not entered a collective.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mpistrat.liveness import deadlines, processes
from mpistrat.liveness.processes import AS_LAUNCHERS_KILL, DEAD, RUNS, state_of
from mpistrat.liveness.records.job_folder import line_of, members_of, ranks_in, record_of, stacks_of
from mpistrat.liveness.records.record import ENDING, LEFT, RUNNING, CommunicatorSlot, RankRecord
from mpistrat.liveness.records.watch import has_not_come


@dataclass(eq=False)
class ObservedRank:
    """A rank of this node, as another process sees it: mostly the observer.

    Attributes:
        record: a view of the rank's record.
        stacks: path of the file to which faulthandler writes the rank's stacks.
        inode: the inode of the record's file.
        script: the pid of the script that the launcher has started and that has started the rank: it may go on after
            the rank. 0: the launcher has started the rank itself.
        starter: the pid of the launcher, or of its daemon on this node; 0 if none is found.
        script_file: a pidfd of `script`; None without a script, or if it has ended.
        dead: whether the detector has noticed that the rank's process has died.
        status: the wait status of the dead process; None while it lives, and if it is not known.
        lost: whether the rank is dead and the other ranks went on without it.
        closed: 1 if the files of this rank were the first to be closed on the node, 2 for the second rank, and so on; 0
            while they are open.
        closed_alive: whether the process lived on after its files were closed.
        became: the command of the program that the rank became by exec, if that closed the files; else "".
    """

    record: RankRecord
    stacks: str
    inode: int
    script: int
    starter: int
    script_file: int | None = None
    dead: bool = False
    status: int | None = None
    lost: bool = False
    closed: int = 0
    closed_alive: bool = False
    became: str = ""

    @property
    def number(self) -> int:
        return self.record.rank

    @property
    def pid(self) -> int:
        return self.record.pid

    @property
    def letter(self) -> str:
        """The state of the rank's process by `processes.state_of`: "R", "S", …; "" if it is gone."""
        return state_of(self.pid, self.record.began)

    @property
    def other_program(self) -> str:
        """The command of the program that the rank's process has become by exec; "" if it still is the rank's program.

        After an exec the process no longer catches the signal that asks a rank for its stack: so an exec is noticed.
        """
        number = self.record.stack_signal
        if not number or self.letter in DEAD:
            return ""
        if processes.catches(self.pid, number):
            return ""
        return processes.command_of(self.pid)

    @property
    def who(self) -> str:
        record = self.record
        place = f"{record.host}, pid {record.pid}"
        return f"rank {record.rank} of {record.size} ({place})"

    @property
    def ended_well(self) -> bool:
        """Whether the death of the rank needs no report; asked only of a dead rank.

        True if its program had ended, if it was ending the job, or if it had no communicator and returned 0. But False
        if a signal killed it after its program had ended, unless its record has moved to another folder. For a rank
        without a communicator that a script has started, the script counts: True if the script still lives, or is not
        known to have failed.
        """
        state = self.record.state
        status = self.status
        if self.script and not self.record.slots():
            return self.replaceable or not processes.exit_status(self.script, self.script_file)
        if state == LEFT:  # the rank may still be killed, as in MPI_Finalize
            was_killed = status is not None and os.WIFSIGNALED(status)
            return not (was_killed and os.path.exists(self.record.path or ""))
        never_joined = state == RUNNING and not self.record.slots()
        return state == ENDING or (never_joined and status == 0)

    @property
    def replaceable(self) -> bool:
        """Whether a script has started the rank and still lives, so that its next program may become this rank."""
        return state_of(self.script) not in DEAD

    @property
    def has_ended(self) -> bool:
        """Whether the rank's program has ended without a failure, and no later program may become this rank.

        The process may be alive or dead. False for a dead rank that needs a report.
        """
        if self.dead:
            return (self.record.has_left or self.ended_well) and not self.replaceable
        return self.record.has_left

    @property
    def calls(self) -> dict[int, int]:
        """From the hash of a communicator's name to the number of collectives that the rank has entered on it."""
        return {slot.group: slot.calls for slot in self.record.slots()}

    @property
    def inside(self) -> bool:
        """Whether the rank is in a collective, or was in one when it died."""
        return any(slot.since for slot in self.record.slots())

    @property
    def is_gone(self) -> bool:
        """Whether the rank is dead, or has come to the end of its program."""
        return self.record.has_left or self.letter in DEAD

    @property
    def stands_still(self) -> bool:
        return self.dead or self.letter not in RUNS


def find_ranks(folder: str, known: Collection[int] = ()) -> list[ObservedRank]:
    """Return an `ObservedRank` for each rank with a finished record in the job's folder, in the order of ranks.

    Args: known: inodes of records to leave out.
    """
    found = []
    for rank, inode in ranks_in(folder).items():
        if inode not in known:
            with contextlib.suppress(OSError, ValueError):  # the record is just being made
                record = RankRecord(record_of(folder, rank))
                script, starter = processes.launched(record.pid)
                found.append(ObservedRank(record, stacks_of(folder, rank), inode, script, starter))
    return found


_WaitingRank = tuple[ObservedRank, CommunicatorSlot]  # with its slot for one communicator


@dataclass(frozen=True)
class Wait:
    """A collective in which some ranks of this node wait. Made by: `waits`.

    Attributes:
        inside: the ranks of this node that wait, at least one, with a copy of each rank's slot for the communicator.
        missing: ranks of this node that have not entered the collective; [] if all have.
        elsewhere: number of the communicator's ranks that are not known on this node.
        members: the communicator's ranks as numbers in the job, if ranks wrote them by `note_members`; else empty.
    """

    inside: dict[ObservedRank, CommunicatorSlot]
    missing: list[ObservedRank]
    elsewhere: int
    members: set[int]

    @property
    def slot(self) -> CommunicatorSlot:
        """The slot of one waiting rank. Call number and communicator are the same in the slots of all waiting ranks."""
        return next(iter(self.inside.values()))

    @property
    def waiting(self) -> list[ObservedRank]:
        return [*self.inside]

    @property
    def record(self) -> RankRecord:
        """The record of one waiting rank."""
        return self.waiting[0].record

    @property
    def suspects(self) -> list[ObservedRank]:
        """The ranks of this node that may hold the others up: the missing ranks.

        If none is missing, the waiting ranks that are dead or stopped; [] if no waiting rank is.
        """
        return self.missing or [rank for rank in self.waiting if rank.stands_still]

    @property
    def since(self) -> int:
        """When the first of the waiting ranks entered the collective, by CLOCK_MONOTONIC in ns."""
        return min(slot.since for slot in self.inside.values())

    @property
    def timeout(self) -> float:
        """The shortest time in seconds after which one of the waiting ranks itself raises an error; 0: never."""
        timeouts = [slot.timeout for slot in self.inside.values() if slot.timeout]
        return min(timeouts, default=0.0)

    @property
    def limit(self) -> float:
        """The seconds after which the observer reports the collective as a stall; 0: never."""
        return self.record.limit_of(self.timeout)

    @property
    def noticed(self) -> bool:
        """Whether the observer has reported this collective after its timeout, and noted that in each waiting rank."""
        waiting = self.inside.items()
        return all(rank.record.noticed == slot.entry for rank, slot in waiting)

    def lasts(self) -> bool:
        """Whether one of the ranks in `inside` is still in this collective, by its present record."""
        group = self.slot.group
        call = self.slot.calls
        for rank in self.inside:
            for slot in rank.record.slots():
                if slot.since and (slot.group, slot.calls) == (group, call):
                    return True
        return False


def waits(ranks: Sequence[ObservedRank], *, of_the_dead: bool = False) -> list[Wait]:
    """Return a `Wait` for each communicator on which a living rank of `ranks` is in a collective, the longest first.

    If a communicator's ranks are in several calls, the `Wait` is for the last of them. [] if no rank is in a call.

    Args: of_the_dead: also count ranks that died in a collective.
    """
    calls: dict[ObservedRank, dict[int, int]] = {}
    waiting: dict[int, list[_WaitingRank]] = {}  # by the hash of the communicator's name
    for rank in ranks:
        calls[rank] = {}
        for slot in rank.record.slots():
            calls[rank][slot.group] = slot.calls
            if slot.since and (of_the_dead or not rank.dead):
                waiting.setdefault(slot.group, []).append((rank, slot))
    found = [_wait_of(pairs, calls) for pairs in waiting.values()]
    return sorted(found, key=lambda wait: wait.since)


def _wait_of(waiting: Sequence[_WaitingRank], calls: dict[ObservedRank, dict[int, int]]) -> Wait:
    """Return the `Wait` in a communicator's last collective: the call with the highest number that a rank is in.

    Args:
        waiting: the ranks that are in a collective of the communicator, at least one, with their slots.
        calls: for each rank of this node, a dict from the hash of a communicator's name to the number of the rank's
            calls on it.
    """
    slots = [slot for _, slot in waiting]
    last = max(slots, key=lambda slot: slot.calls)
    call = last.calls
    group = last.group
    inside = {rank: slot for rank, slot in waiting if slot.calls == call}
    first, _ = waiting[0]
    members = members_of(first.record.folder, group)
    here = 0  # number of the communicator's ranks that are known on this node
    missing = []
    for rank, made in calls.items():
        if group in made or rank.number in members:
            here += 1
            if has_not_come(made.get(group), call, is_member=True):
                missing.append(rank)
    return Wait(inside, missing, last.size - here, members)


def awaited(ranks: Sequence[ObservedRank], *, of_the_dead: bool = False) -> set[ObservedRank]:
    """Return the ranks of `ranks` that have not entered a collective in which other ranks of this node wait.

    Args: of_the_dead: also count ranks that died in a collective as waiting.
    """
    missing: set[ObservedRank] = set()
    for wait in waits(ranks, of_the_dead=of_the_dead):
        missing.update(wait.missing)
    return missing


class FailureDetector:
    """Finds the ranks of a job on this node, and watches them for deaths.

    Args: when_one_ends: called at once with a rank that announces its exit, closes its files, or dies.
    Attributes:
        deaths: the dead ranks, in the order in which the kernel reported their deaths.
        first_died: when the first rank died, by `time.monotonic()`; 0.0 while all live, and after the other ranks went
            on without a lost rank.
    """

    def __init__(self, folder: str, when_one_ends: Callable[[ObservedRank], None]) -> None:
        self._by_number: dict[int, ObservedRank] = {}
        self.deaths: list[ObservedRank] = []
        self.first_died = 0.0
        self._folder = folder
        self._epoll = select.epoll()
        self._by_pidfd: dict[int, ObservedRank] = {}
        self._by_line: dict[int, ObservedRank] = {}
        self._num_closed = 0  # ranks that have closed their files
        self._without_pidfd: list[ObservedRank] = []
        self._when_one_ends = when_one_ends

    def find(self) -> list[ObservedRank]:
        """Return the ranks with records that this detector has not seen before, and watch them from now on.

        A rank's new record replaces its old one, because a launcher's script may run one program after another.
        """
        found = find_ranks(self._folder, known={rank.inode for rank in self.ranks})
        for rank in found:
            before = self._by_number.get(rank.number)
            if before in self.deaths:
                self.deaths.remove(before)
            self._by_number[rank.number] = rank
            with contextlib.suppress(OSError):  # there is no script, or it has ended
                rank.script_file = processes.open_pidfd(rank.script)
            with contextlib.suppress(OSError):
                path = line_of(self._folder, rank.number)
                line = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._by_line[line] = rank
                events = select.EPOLLIN | select.EPOLLHUP | select.EPOLLET
                self._epoll.register(line, events)
            try:
                pidfd = processes.open_pidfd(rank.pid)
            except ProcessLookupError:
                self._dies(rank, None)
            except OSError:
                self._without_pidfd.append(rank)
            else:
                self._by_pidfd[pidfd] = rank
                self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLET)
        return found

    def wait(self, seconds: float) -> None:
        """Wait `seconds`; stop earlier if a rank dies, closes its files or announces its exit.

        If any rank has died, then wait on, also beyond `seconds`, until 0.4 s after the first death or until all ranks
        are dead. So one report names all ranks that die together.
        """
        self._wait(seconds)
        until = self.first_died + deadlines.OBSERVER_WAITS_FOR_JOINT_DEATHS
        while self.deaths and not self.all_are_dead:
            left = until - time.monotonic()
            if left <= 0:
                break
            self._wait(left)

    @property
    def ranks(self) -> list[ObservedRank]:
        """All ranks that were found so far. Of a rank with several records, it is the last one."""
        return [*self._by_number.values()]

    @property
    def all_are_dead(self) -> bool:
        """Whether all ranks that were found are dead; True if none was found."""
        return len(self.deaths) == len(self._by_number)

    @property
    def going_on(self) -> list[ObservedRank]:
        """All ranks that were found, except lost ranks."""
        return [rank for rank in self.ranks if not rank.lost]

    def unexplained(self) -> list[ObservedRank]:
        """Return the dead ranks that need a report, in the order of `deaths`; [] without any.

        Left out are ranks that ended well, lost ranks, and ranks that the launcher killed because of another rank.
        """
        unexplained = []
        for rank in self.deaths:
            is_explained = rank.ended_well or rank.lost or self._killed_in_turn(rank)
            if not is_explained:
                unexplained.append(rank)
        return unexplained

    def _killed_in_turn(self, rank: ObservedRank) -> bool:
        """Whether the launcher may have killed the dead rank because another rank had exited.

        True if a signal that launchers use killed it, and either a rank that ended well has exited, or any rank has
        exited and this rank's program had ended.
        """
        if rank.status not in AS_LAUNCHERS_KILL:
            return False
        had_left = rank.record.state == LEFT
        for other in self.deaths:
            exited = other.status and os.WIFEXITED(other.status)
            if exited and (had_left or other.ended_well):
                return True
        return False

    def others_may_go_on(self) -> bool:
        """Whether the job may have ranks that can go on without the dead ranks.

        True if a rank of this node lives or its program had ended, or if the job has ranks on other nodes.
        """
        ranks = self.ranks
        for rank in ranks:
            if not rank.dead or rank.record.state == LEFT:
                return True
        return len(ranks) < ranks[0].record.size

    def exited_together(self, unexplained: Collection[ObservedRank]) -> bool:
        """Whether all ranks may have ended by os._exit(0) after the same collectives. Then nothing is to be reported.

        While ranks live, True only in the first second after the first death, if the dead ranks have returned 0 and no
        rank waits for them in a collective.

        Args: unexplained: the dead ranks of `unexplained()`.
        """
        ranks = self.ranks
        if self.all_are_dead:
            # Before Linux 6.15 the kernel forgets a rank's exit status as soon as the launcher has read it. The
            # launcher may kill a rank that has announced its exit.
            statuses = {rank.status for rank in unexplained if not rank.record.exits}
            return statuses <= {0, None} and not calls_differ(ranks)
        statuses = {rank.status for rank in unexplained}
        is_early = time.monotonic() - self.first_died < deadlines.OBSERVER_WAITS_FOR_JOINT_EXITS
        return statuses <= {0} and is_early and awaited(ranks).isdisjoint(unexplained)

    def in_state(self, state: int) -> list[ObservedRank]:
        return [rank for rank in self.ranks if rank.record.state == state]

    def _wait(self, seconds: float) -> None:
        for file, event in self._epoll.poll(seconds):  # in the order of the events
            if file in self._by_line:
                if event & select.EPOLLIN:  # the rank announces its exit
                    self._when_one_ends(self._by_line[file])
                if event & select.EPOLLHUP:
                    self._closes(self._by_line.pop(file))
                    os.close(file)
                continue
            rank = self._by_pidfd[file]
            if not rank.dead:
                self._dies(rank, processes.exit_status(rank.pid, file))
            elif rank.status is None:  # the second event: the process was reaped
                rank.status = processes.exit_status(rank.pid, file)
        for rank in self._without_pidfd:
            if not rank.dead and rank.letter in DEAD:
                self._dies(rank, processes.exit_status(rank.pid, None))

    def _closes(self, rank: ObservedRank) -> None:
        self._num_closed += 1
        rank.closed = self._num_closed
        rank.closed_alive = not processes.is_exiting(rank.pid)
        rank.became = rank.other_program
        if self._by_number[rank.number] is rank:
            self._when_one_ends(rank)

    def _dies(self, rank: ObservedRank, status: int | None) -> None:
        rank.dead = True
        rank.status = status
        if self._by_number[rank.number] is rank:
            self.deaths.append(rank)
            self.first_died = self.first_died or time.monotonic()
            self._when_one_ends(rank)


def others_may_start(ranks: Collection[ObservedRank]) -> bool:
    """Whether ranks of the job may not have started yet, although all of `ranks` have ended.

    Args: ranks: all ranks that were found on this node, at least one.
    Returns: True if the launcher has a child process. But False if a rank had a communicator, or if all ranks of the
        job were found.
    """
    first = next(iter(ranks))
    communicators = sum(len(rank.record.slots()) for rank in ranks)
    if communicators or len(ranks) >= first.record.size:
        return False
    return processes.has_children(first.starter)  # the launcher starts all ranks of this node


def first_death(deaths: list[ObservedRank]) -> ObservedRank:
    """Return the rank that died by itself, so that the launcher killed the other ranks.

    It is the first rank with a known status other than SIGKILL and SIGTERM, the signals of launchers; without one, the
    first rank that others waited for in a collective; without one, the first rank. "First" means that its files were
    closed first, because a dying process closes its files, and its connection to the launcher, a while before the
    kernel reports its death.

    Args: deaths: the dead ranks, at least one, in the order in which the kernel reported them. This order counts if
        the files of a rank were not seen to close.
    """
    if 0 not in [rank.closed for rank in deaths]:
        deaths = sorted(deaths, key=lambda rank: rank.closed)
    ended_themselves = [
        rank
        for rank in deaths
        if rank.status is not None and rank.status & 0x7F not in AS_LAUNCHERS_KILL
    ]
    late = awaited(deaths, of_the_dead=True)
    missing = [rank for rank in deaths if rank in late]
    return [*ended_themselves, *missing, *deaths][0]


def calls_differ(ranks: Collection[ObservedRank]) -> bool:
    """Whether two ranks made different numbers of calls on a communicator, or a rank is in a call, or died in one."""
    calls: set[tuple[int, int]] = set()
    for rank in ranks:
        calls.update(rank.calls.items())
    numbers_differ = len(calls) > len(dict(calls))
    return numbers_differ or any(rank.inside for rank in ranks)
