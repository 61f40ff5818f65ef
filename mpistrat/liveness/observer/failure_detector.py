"""Which ranks of this node are dead, and which wait for others.

The kernel tells of deaths: by a pidfd for each rank, and by the end of a FIFO ("line") that each rank holds open. The
ranks' records tell who has not come to a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
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
    """A rank of this node, as seen from outside. `status` is its wait status once it is dead, None if unknown."""

    record: RankRecord
    stacks: str
    inode: int  # of the record's file
    # What the launcher has started, if not this process: a script, which may go on, or a program with children.
    script: int  # 0: it has started this process
    starter: int  # the launcher, or its daemon; 0 where none is found
    script_file: int | None = None  # its pidfd
    dead: bool = False
    status: int | None = None
    lost: bool = False  # dead, and the others went on without it
    closed: int = 0  # when it closed its files: counts from 1
    closed_alive: bool = False  # and lived on
    became: str = ""  # the command of the other program that closed them, by exec

    @property
    def number(self) -> int:
        return self.record.rank

    @property
    def pid(self) -> int:
        return self.record.pid

    @property
    def letter(self) -> str:
        """The state of its process; see `processes.state_of`."""
        return state_of(self.pid, self.record.began)

    @property
    def other_program(self) -> str:
        """The command of the program that the process has become, by exec; "" if it is still the rank's.

        Such a process no longer catches the signal that asks a rank for its stack.
        """
        number = self.record.stack_signal
        is_the_rank = not number or self.letter in DEAD or processes.catches(self.pid, number)
        return "" if is_the_rank else processes.command_of(self.pid)

    @property
    def who(self) -> str:
        record = self.record
        return f"rank {record.rank} of {record.size} ({record.host}, pid {record.pid})"

    @property
    def ended_well(self) -> bool:
        """Whether the dead rank had said that it leaves, or ends the job, or had nothing to say."""
        state, status = self.record.state, self.status
        if self.script and not self.record.slots():
            return self.replaceable or not processes.exit_status(self.script, self.script_file)
        if state == LEFT:  # it may be killed all the same, in MPI_Finalize for one
            was_killed = status is not None and os.WIFSIGNALED(status)
            return not (was_killed and os.path.exists(self.record.path or ""))
        never_joined = state == RUNNING and not self.record.slots()
        return state == ENDING or (never_joined and status == 0)

    @property
    def replaceable(self) -> bool:
        """Whether a program that the launcher's script runs next may become this rank."""
        return state_of(self.script) not in DEAD

    @property
    def has_ended(self) -> bool:
        """Whether it has come to its end, or died there, and nothing may take its place."""
        if self.dead:
            return (self.record.has_left or self.ended_well) and not self.replaceable
        return self.record.has_left

    @property
    def calls(self) -> dict[int, int]:
        """How many calls it has made in each communicator, by the hash of the communicator's name."""
        return {slot.group: slot.calls for slot in self.record.slots()}

    @property
    def inside(self) -> bool:
        """Whether it is, or was when it died, in a collective."""
        return any(slot.since for slot in self.record.slots())

    @property
    def is_gone(self) -> bool:
        """Whether it is dead, or has come to the end of its program."""
        return self.record.has_left or self.letter in DEAD

    @property
    def stands_still(self) -> bool:
        return self.dead or self.letter not in RUNS


def find_ranks(folder: str, known: Collection[int] = ()) -> list[ObservedRank]:
    """The ranks that have a record in a job's folder, by number; records whose inode is in `known` are left out."""
    found = []
    for rank, inode in ranks_in(folder).items():
        if inode not in known:
            with contextlib.suppress(OSError, ValueError):  # being made just now
                record = RankRecord(record_of(folder, rank))
                script, starter = processes.launched(record.pid)
                found.append(ObservedRank(record, stacks_of(folder, rank), inode, script, starter))
    return found


@dataclass(frozen=True)
class Wait:
    """The collective that some ranks wait in, seen from all ranks of its communicator on this node."""

    inside: dict[ObservedRank, CommunicatorSlot]  # the ranks that wait, by their slots
    missing: list[ObservedRank]
    elsewhere: int  # how many of its communicator's ranks are on other nodes
    members: set[int]  # by numbers in the job; empty where they were not numbers

    @property
    def slot(self) -> CommunicatorSlot:
        """Of one of the waiting ranks: the call's number, and what is said of the communicator, are the same in all."""
        return next(iter(self.inside.values()))

    @property
    def waiting(self) -> list[ObservedRank]:
        return [*self.inside]

    @property
    def suspects(self) -> list[ObservedRank]:
        """The ranks of this node that may keep the others waiting: a rank inside MPI is not missing, but may do so."""
        return self.missing or [rank for rank in self.waiting if rank.stands_still]

    @property
    def since(self) -> int:
        """When the first of the waiting ranks entered it."""
        return min(slot.since for slot in self.inside.values())

    @property
    def timeout(self) -> float:
        """After so many seconds the waiting ranks raise an error; 0: never."""
        return min((s.timeout for s in self.inside.values() if s.timeout), default=0.0)

    @property
    def limit(self) -> float:
        """How many seconds it may last; 0: no limit."""
        return self.waiting[0].record.limit_of(self.timeout)

    @property
    def noticed(self) -> bool:
        """Whether it was said, after the timeout, for whom all of the waiting ranks wait."""
        return all(rank.record.noticed == slot.entry for rank, slot in self.inside.items())

    def lasts(self) -> bool:
        """Whether the ranks still wait in it."""
        call = self.slot.group, self.slot.calls
        slots = itertools.chain.from_iterable(rank.record.slots() for rank in self.inside)
        return any((slot.group, slot.calls) == call and slot.since for slot in slots)


def waits(ranks: Sequence[ObservedRank], *, of_the_dead: bool = False) -> list[Wait]:
    """Each collective that a living rank is inside of, the one waited in for longest first.

    With `of_the_dead`, also those that a rank died in.
    """
    calls: dict[ObservedRank, dict[int, int]] = {}
    waiting: dict[int, list[tuple[ObservedRank, CommunicatorSlot]]] = {}  # by communicator
    for rank in ranks:
        calls[rank] = {}
        for slot in rank.record.slots():
            calls[rank][slot.group] = slot.calls
            if slot.since and (of_the_dead or not rank.dead):
                waiting.setdefault(slot.group, []).append((rank, slot))
    found = [_wait_of(pairs, calls) for pairs in waiting.values()]
    return sorted(found, key=operator.attrgetter("since"))


def _wait_of(
    waiting: Sequence[tuple[ObservedRank, CommunicatorSlot]],
    calls: dict[ObservedRank, dict[int, int]],
) -> Wait:
    """The last collective of a communicator that some of its ranks wait in.

    Args:
        waiting: these ranks, with their slots.
        calls: how many calls each rank of this node has made, by communicator.
    """
    last = max((slot for _, slot in waiting), key=operator.attrgetter("calls"))
    inside = {rank: slot for rank, slot in waiting if slot.calls == last.calls}
    group, members = last.group, members_of(waiting[0][0].record.folder, last.group)
    here = [rank for rank in calls if group in calls[rank] or rank.number in members]
    missing = [r for r in here if has_not_come(calls[r].get(group), last.calls, is_member=True)]
    return Wait(inside, missing, last.size - len(here), members)


def awaited(ranks: Sequence[ObservedRank], *, of_the_dead: bool = False) -> set[ObservedRank]:
    """The ranks that others wait for in a collective; with `of_the_dead`, also those that a dead rank waited for."""
    return {rank for wait in waits(ranks, of_the_dead=of_the_dead) for rank in wait.missing}


class FailureDetector:
    """The ranks of a job on this node, and those of them that have died.

    Args: when_one_ends: called at once with a rank that says that it is about to end, that closes its files, or dies,
        before others are waited for.
    Attributes:
        ranks: that were found so far, by number.
        deaths: the dead, in the order that the kernel reported.
        first_died: when the first died, by `time.monotonic`; 0.0 while all live, and once the others have gone on.
    """

    def __init__(self, folder: str, when_one_ends: Callable[[ObservedRank], None]) -> None:
        self.ranks: dict[int, ObservedRank] = {}
        self.deaths: list[ObservedRank] = []
        self.first_died = 0.0
        self._folder = folder
        self._epoll = select.epoll()
        self._by_pidfd: dict[int, ObservedRank] = {}
        self._by_line: dict[int, ObservedRank] = {}
        self._closings = itertools.count(1)
        self._without_pidfd: list[ObservedRank] = []
        self._when_one_ends = when_one_ends

    def find(self) -> list[ObservedRank]:
        """The ranks whose records are new in the folder; from now on they are watched.

        A new record takes the place of one of the same number: the launcher's script runs one program after another.
        """
        found = find_ranks(self._folder, known={rank.inode for rank in self.ranks.values()})
        for rank in found:
            before = self.ranks.get(rank.number)
            self.deaths = [dead for dead in self.deaths if dead is not before]
            self.ranks[rank.number] = rank
            with contextlib.suppress(OSError):  # there is none, or it has ended
                rank.script_file = processes.open_pidfd(rank.script)
            with contextlib.suppress(OSError):
                line = os.open(line_of(self._folder, rank.number), os.O_RDONLY | os.O_NONBLOCK)
                self._by_line[line] = rank
                self._epoll.register(line, select.EPOLLIN | select.EPOLLHUP | select.EPOLLET)
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
        """Return after `seconds`, or once ranks have died: then with all that die in the same moment."""
        self._wait(seconds)
        until = self.first_died + deadlines.OBSERVER_WAITS_FOR_JOINT_DEATHS
        while self.deaths and not self.all_are_dead and (left := until - time.monotonic()) > 0:
            self._wait(left)

    @property
    def all_are_dead(self) -> bool:
        """Whether no rank is left, of those that were found."""
        return len(self.deaths) == len(self.ranks)

    @property
    def going_on(self) -> list[ObservedRank]:
        """All but those that the others went on without."""
        return [rank for rank in self.ranks.values() if not rank.lost]

    def unexplained(self) -> list[ObservedRank]:
        """The dead that had not said that they leave or end the job."""
        return [r for r in self.deaths if not (r.ended_well or r.lost or self._killed_in_turn(r))]

    def _killed_in_turn(self, rank: ObservedRank) -> bool:
        """Whether the launcher may have killed the dead rank, because another had returned an exit code."""
        if rank.status not in AS_LAUNCHERS_KILL:
            return False
        returned = [r for r in self.deaths if r.status and os.WIFEXITED(r.status)]
        had_left = bool(returned) and rank.record.state == LEFT
        return had_left or any(r.ended_well for r in returned)

    def others_may_go_on(self) -> bool:
        """Whether there are ranks that live, here or on other nodes, or have come to their end by now."""
        ranks = list(self.ranks.values())
        elsewhere = len(ranks) < ranks[0].record.size
        return elsewhere or any(not r.dead or r.record.state == LEFT for r in ranks)

    def exited_together(self, unexplained: Collection[ObservedRank]) -> bool:
        """Whether all ranks have ended by os._exit(0) after the same calls, or may do so in a moment."""
        ranks = list(self.ranks.values())
        if self.all_are_dead:
            # Before Linux 6.15 the exit status of a rank is forgotten as soon as its launcher has it. The launcher may
            # kill a rank that had said that it is about to end.
            may_be_0 = all(rank.record.exits or rank.status in (0, None) for rank in unexplained)
            return may_be_0 and not calls_differ(ranks)
        returned_0 = all(rank.status == 0 for rank in unexplained)
        is_early = time.monotonic() - self.first_died < deadlines.OBSERVER_WAITS_FOR_JOINT_EXITS
        return returned_0 and is_early and awaited(ranks).isdisjoint(unexplained)

    @property
    def starting(self) -> list[ObservedRank]:
        """Those that wait for all ranks to start."""
        return [rank for rank in self.ranks.values() if rank.record.starting]

    def in_state(self, state: int) -> list[ObservedRank]:
        return [rank for rank in self.ranks.values() if rank.record.state == state]

    def _wait(self, seconds: float) -> None:
        for file, event in self._epoll.poll(seconds):  # in the order in which they came
            if file in self._by_line:
                if event & select.EPOLLIN:  # it says that it is about to end
                    self._when_one_ends(self._by_line[file])
                if event & select.EPOLLHUP:
                    self._closes(self._by_line.pop(file))
                    os.close(file)
                continue
            rank = self._by_pidfd[file]
            if not rank.dead:
                self._dies(rank, processes.exit_status(rank.pid, file))
            elif rank.status is None:  # a second event, when it was reaped
                rank.status = processes.exit_status(rank.pid, file)
        for rank in self._without_pidfd:
            if not rank.dead and rank.letter in DEAD:
                self._dies(rank, processes.exit_status(rank.pid, None))

    def _closes(self, rank: ObservedRank) -> None:
        rank.closed = next(self._closings)
        rank.closed_alive = not processes.is_exiting(rank.pid)
        rank.became = rank.other_program
        if self.ranks[rank.number] is rank:
            self._when_one_ends(rank)

    def _dies(self, rank: ObservedRank, status: int | None) -> None:
        rank.dead, rank.status = True, status
        if self.ranks[rank.number] is rank:
            self.deaths.append(rank)
            self.first_died = self.first_died or time.monotonic()
            self._when_one_ends(rank)


def others_may_start(ranks: Collection[ObservedRank]) -> bool:
    """Whether the ranks that were found, one at least, may have ended before others of the job have started."""
    first = next(iter(ranks))
    communicators = sum(len(rank.record.slots()) for rank in ranks)
    if communicators or len(ranks) >= first.record.size:
        return False
    return processes.has_children(first.starter)  # the launcher starts the others of this node, too


def first_death(deaths: list[ObservedRank]) -> ObservedRank:
    """The rank whose death was the cause of the others': the launcher may have killed those in its clean-up.

    The kernel may report one of those first: a process closes its connection to the launcher a while before it counts
    as dead. It closes its files in the same moment. A rank that was killed in a collective which another had not
    entered was waiting.
    """
    if all(rank.closed for rank in deaths):
        deaths = sorted(deaths, key=operator.attrgetter("closed"))
    ended_themselves = [
        r for r in deaths if r.status is not None and r.status & 0x7F not in AS_LAUNCHERS_KILL
    ]
    late = awaited(deaths, of_the_dead=True)
    missing = [rank for rank in deaths if rank in late]
    return [*ended_themselves, *missing, *deaths][0]


def calls_differ(ranks: Collection[ObservedRank]) -> bool:
    """Whether ranks made different numbers of calls on a communicator, or one is, or died, in a call."""
    calls = {made for rank in ranks for made in rank.calls.items()}
    return any(rank.inside for rank in ranks) or len(calls) > len(dict(calls))
