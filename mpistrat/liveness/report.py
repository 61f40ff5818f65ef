"""In words: which ranks are missing where others wait, and what each of them does instead."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpistrat.liveness.job_folder import ranks_in, record_of, stacks_of
from mpistrat.liveness.processes import (
    RUNS,
    StackRequest,
    cpu_seconds,
    describe_exit,
    describe_state,
    state_of,
)
from mpistrat.liveness.record import (
    LEAVING,
    LEFT,
    PID,
    RANK,
    SIZE,
    STACK_SIGNAL,
    STATE,
    Board,
    Entry,
    RankRecord,
)

_MOST_FRAMES = 12
_MOST_RANKS = 24  # that are told of one by one
_LAUNCHERS_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
_SECONDS_OF_CPU = 0.3
_BUSY = 0.1  # of a core, which it may have to share


@dataclass(eq=False)
class Rank:
    """A rank of this node, as seen from outside. `status` is its wait status once it is dead, None if unknown."""

    record: RankRecord
    stacks: str
    dead: bool = False
    status: int | None = None
    lost: bool = False  # dead, and the others went on without it

    @property
    def number(self) -> int:
        return int(self.record.words[RANK])

    @property
    def pid(self) -> int:
        return int(self.record.words[PID])

    @property
    def who(self) -> str:
        words = self.record.words
        return f"rank {words[RANK]} of {words[SIZE]} ({self.record.host}, pid {words[PID]})"

    @property
    def has_left(self) -> bool:
        return self.record.words[STATE] in (LEAVING, LEFT)

    @property
    def inside(self) -> bool:
        """Whether it is, or was when it died, in a collective."""
        return any(board.since for board in self.record.boards())

    @property
    def stands_still(self) -> bool:
        return self.dead or state_of(self.pid) not in RUNS


@dataclass(frozen=True)
class Wait:
    """The collective that some ranks wait in, seen from all ranks of its communicator on this node."""

    call: int
    size: int
    since: int  # when the first of the waiting ranks entered it
    waiting: list[Rank]
    missing: list[Rank]
    group: int  # the hash of its communicator's name
    first: int  # the number in the job of its communicator's rank 0

    @property
    def elsewhere(self) -> int:
        """How many of its ranks are on other nodes."""
        return self.size - len(self.waiting) - len(self.missing)

    def lasts(self) -> bool:
        """Whether the ranks still wait in it."""
        return any(
            board.group == self.group and board.calls == self.call and board.since
            for rank in self.waiting
            for board in rank.record.boards()
        )


def waits(ranks: list[Rank], *, of_the_dead: bool = False) -> list[Wait]:
    """Each collective that a living rank is inside of, the one waited in for longest first.

    With `of_the_dead`, also those that a rank died in.
    """
    groups: dict[int, list[tuple[Rank, Board]]] = {}
    for rank in ranks:
        for board in rank.record.boards():
            groups.setdefault(board.group, []).append((rank, board))
    found = []
    for group, members in groups.items():
        inside = [
            (rank, board)
            for rank, board in members
            if board.since and (of_the_dead or not rank.dead)
        ]
        if inside:
            call = max(board.calls for _, board in inside)
            waiting = [rank for rank, board in inside if board.calls == call]
            since = min(board.since for _, board in inside if board.calls == call)
            missing = [rank for rank, board in members if board.calls < call]
            of = members[0][1]
            found.append(Wait(call, of.size, since, waiting, missing, group, of.first))
    return sorted(found, key=lambda wait: wait.since)


def stall_report(
    ranks: list[Rank],
    wait: Wait,
    waited: float,
    limit: float,
    missing_elsewhere: Sequence[int] = (),
    told: Sequence[str] = (),
) -> str:
    """Why ranks have waited for `waited` seconds.

    `missing_elsewhere` and `told` are what other nodes said, if they did.
    """
    head = (
        f"ranks have waited {waited:.1f} s in a collective "
        f"(MPISTRAT_STALL_SECONDS allows {limit:g} s)"
    )
    elsewhere = wait.elsewhere
    # A rank inside MPI is not missing, and may yet be what the others wait for.
    suspects = wait.missing or [rank for rank in wait.waiting if rank.stands_still]
    missing = sorted([*missing_elsewhere, *(rank.number for rank in wait.missing)])
    if missing:
        head += f": {_numbers(missing)} {'has' if len(missing) == 1 else 'have'} not come to it"
    elif suspects:
        head += f": {_ranks(suspects)} entered it, and does not go on"
    elif elsewhere and not told:
        head += ": all its ranks on this node have come to it, so some on other nodes have not"
    else:
        head += ": all ranks have come to it, but it does not end"
    lines = [head, *_what_they_do(suspects, wait.group)]
    lines += _in_calls([rank for rank in wait.waiting if rank not in suspects], wait.group)
    if not suspects and not elsewhere:
        stacks = _ask_for_stacks(wait.waiting)
        for rank, stack in list(zip(wait.waiting, stacks, strict=True))[:_MOST_RANKS]:
            lines += [f"  {rank.who}", *_stack(rank, stack)]
    mentioned = {rank.number for rank in (*suspects, *wait.waiting)}
    lines += _what_they_do([rank for rank in ranks if rank.number not in mentioned], wait.group)
    lines += told
    if elsewhere and not told:
        lines.append(f"  {elsewhere} of its {wait.size} ranks are on other nodes.")
    lines += straggler([*wait.waiting, *wait.missing])
    lines.append(
        "Every rank must make the same calls. If one is only slow, allow more: MPISTRAT_STALL_SECONDS=N (0: no limit)."
    )
    return "\n".join(lines)


def first_death(deaths: list[Rank]) -> Rank:
    """Whose death was the cause of the others', which the launcher may have killed in its clean-up.

    Under load the kernel may tell of one of those first: a process closes its connection to the launcher a while
    before it counts as dead. Those that were killed in a collective which another had not entered were waiting.
    """
    own_end = [
        rank
        for rank in deaths
        if rank.status is not None and rank.status & 0x7F not in _LAUNCHERS_SIGNALS
    ]
    missing = [
        rank
        for rank in deaths
        if any(rank in wait.missing for wait in waits(deaths, of_the_dead=True))
    ]
    return (own_end or missing or deaths)[0]


def death_report(ranks: list[Rank], first: Rank) -> str:
    lines = [f"{first.who} {describe_exit(first.status)}"]
    lines.append(f"  it {_last_words(first)}")
    spoken = _spoken_at_death(first)
    if spoken:
        lines += ["  its last words:", *(f"      {line}" for line in spoken)]
    others = [rank for rank in ranks if rank is not first]
    lines += _in_calls([rank for rank in others if rank.inside])
    for rank in others:
        if rank.inside or rank.has_left:
            continue
        lines.append(f"  rank {rank.number}: {_last_words(rank)}")
    if first.record.words[SIZE] > len(ranks) and first.status in _LAUNCHERS_SIGNALS:
        lines.append(
            "  If a rank of another node failed before, the launcher killed this one; each node reports for itself."
        )
    return "\n".join(lines)


def account_of(ranks: list[Rank]) -> list[str]:
    """What the ranks of a node do, for the report of another."""
    inside = [rank for rank in ranks if rank.inside and not rank.stands_still]
    return _what_they_do([rank for rank in ranks if rank not in inside]) + _in_calls(inside)


def leaving_notice(ranks: list[Rank], seconds: float) -> str:
    """That ranks have come to their end and wait for others, which may be right."""
    gone = [rank for rank in ranks if rank.record.words[STATE] == LEAVING]
    lines = [
        f"{_ranks(gone)} came to the end of the program {seconds:.0f} s ago and {_verb(gone, 'wait')} for the other "
        "ranks. If one of those waits in turn, in an MPI call of the program's own, this job hangs:"
    ]
    return "\n".join(lines + _what_they_do([rank for rank in ranks if rank not in gone]))


def straggler(ranks: list[Rank]) -> list[str]:
    """Whom the others waited for in the last minute: the rank that waited least itself."""
    waited = sorted((rank.record.seconds_waited(), rank.number) for rank in ranks if not rank.dead)
    if len(waited) < 2 or waited[-1][0] - waited[0][0] < 1.0:
        return []
    return [
        f"  In the last minute before, rank {waited[0][1]} was the slowest: it waited {waited[0][0]:.1f} s for others, "
        f"rank {waited[-1][1]} waited {waited[-1][0]:.1f} s."
    ]


def _what_they_do(ranks: list[Rank], group: int | None = None) -> list[str]:
    """Of each rank, how it does, which was its last collective, and where it stands."""
    if not ranks:
        return []
    used = [cpu_seconds(rank.pid) for rank in ranks]
    started = time.monotonic()
    time.sleep(_SECONDS_OF_CPU)
    elapsed = time.monotonic() - started
    states = [
        _state(rank, (cpu_seconds(rank.pid) - before) / elapsed)
        for rank, before in zip(ranks, used, strict=True)
    ]
    lines = []
    told = list(zip(ranks, states, _ask_for_stacks(ranks), strict=True))
    for rank, state, stack in told[:_MOST_RANKS]:
        lines += [f"  {rank.who} {state}; it {_last_words(rank, group)}", *_stack(rank, stack)]
    if len(ranks) > _MOST_RANKS:
        lines.append(f"  and {_ranks(ranks[_MOST_RANKS:])}")
    return lines


def _ask_for_stacks(ranks: list[Rank]) -> list[StackRequest | None]:
    """Of all at once: together they have as long to answer as one."""
    requests: list[StackRequest | None] = []
    for rank in ranks:
        words = rank.record.words
        about = rank.pid, words[STACK_SIGNAL], rank.stacks
        asked = not rank.dead and len(requests) < _MOST_RANKS
        requests.append(StackRequest(*about) if asked else None)
    return requests


def _state(rank: Rank, busy: float) -> str:
    if rank.dead:
        return describe_exit(rank.status)
    if rank.has_left:
        return "has come to the end of its program"
    letter = state_of(rank.pid)
    if letter not in ("R", "S"):
        return f"is {describe_state(letter)}"
    how = "busy" if busy > _BUSY or letter == "R" else "idle"
    return f"is {how} ({100 * busy:.0f} % of a core)"


def _last_words(rank: Rank, group: int | None = None) -> str:
    """Its last collective of the group (of any where none is given), and the one of another group that it is in."""
    record, boards = rank.record, rank.record.boards()
    last = next((record.entry_of(board) for board in boards if board.group == group), None)
    if last is None:
        last = next(iter(record.last(1)), None)
    told = "has not entered a collective" if last is None else _told(rank, last)
    for board in boards:
        entry = record.entry_of(board)
        if board.since and entry and entry != last:
            told += f"\n    of another communicator it {_told(rank, entry)}"
    return told


def _told(rank: Rank, entry: Entry) -> str:
    inside = any(board.base == entry.board and board.since for board in rank.record.boards())
    ago = (time.monotonic_ns() - entry.entered) / 1e9
    verb = "is in" if inside and not rank.dead else "was in" if inside else "had finished"
    return f"{verb} collective number {entry.number}, entered {ago:.1f} s ago: {entry.call}\n      at {entry.site}"


def _stack(rank: Rank, request: StackRequest | None) -> list[str]:
    if request is None or rank.stands_still:
        return []
    frames = request.frames()
    if not frames:
        return ["    and did not answer when it was asked for its stack"]
    return ["    and stands (innermost call first)", *(f"      {f}" for f in frames[:_MOST_FRAMES])]


def _spoken_at_death(rank: Rank) -> list[str]:
    """faulthandler's words about a fatal signal."""
    try:
        with open(rank.stacks, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return []
    start = text.rfind("Fatal Python error")
    return (
        [line.rstrip() for line in text[start:].splitlines()[:_MOST_FRAMES]] if start >= 0 else []
    )


def _in_calls(ranks: list[Rank], group: int | None = None) -> list[str]:
    """The collectives, of the group or of any, that ranks are in; those in the same one together."""
    calls: dict[str, list[Rank]] = {}
    for rank in ranks:
        for board in rank.record.boards():
            if not board.since or group not in (None, board.group):
                continue
            entry = rank.record.entry_of(board)  # None when other threads made many calls since
            told = f": {entry.call}\n      at {entry.site}" if entry else ""
            calls.setdefault(f"in collective number {board.calls}{told}", []).append(rank)
    return [f"  {_ranks(those)} {_verb(those, 'wait')} {text}" for text, those in calls.items()]


def _verb(ranks: list[Rank], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb


def _ranks(ranks: list[Rank]) -> str:
    return _numbers(sorted(rank.number for rank in ranks))


def _numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def find_ranks(folder: str, known: Collection[int] = ()) -> list[Rank]:
    """The ranks whose records lie in a job's folder, by number, but those `known` already."""
    found = []
    for rank in ranks_in(folder):
        if rank not in known:
            with contextlib.suppress(OSError, ValueError):  # being made just now
                found.append(Rank(RankRecord(record_of(folder, rank)), stacks_of(folder, rank)))
    return found
