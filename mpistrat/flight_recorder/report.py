"""In words: which ranks are missing where others wait, and what each of them does instead."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpistrat.flight_recorder.job_folder import ranks_in, record_of, stacks_of
from mpistrat.flight_recorder.processes import (
    RUNS,
    cpu_seconds,
    describe_exit,
    describe_state,
    stack_of,
    state_of,
)
from mpistrat.flight_recorder.record import (
    LEFT,
    MAIN_THREAD,
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
        return bool(self.record.words[STATE] == LEFT)

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

    @property
    def elsewhere(self) -> int:
        """How many of its ranks are on other nodes."""
        return self.size - len(self.waiting) - len(self.missing)


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
            found.append(Wait(call, members[0][1].size, since, waiting, missing, group))
    return sorted(found, key=lambda wait: wait.since)


def stall_report(
    ranks: list[Rank],
    wait: Wait,
    limit: float,
    missing_elsewhere: Sequence[int] = (),
    told: Sequence[str] = (),
) -> str:
    """Why ranks wait. `missing_elsewhere` and `told` are what other nodes said, if they did."""
    now = time.monotonic_ns()
    head = (
        f"ranks have waited {(now - wait.since) / 1e9:.1f} s in a collective "
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
    cpu = {rank.number: cpu_seconds(rank.pid) for rank in suspects}
    started = time.monotonic()
    time.sleep(_SECONDS_OF_CPU)
    lines = [head]
    for rank in suspects:
        elapsed = time.monotonic() - started
        busy = (cpu_seconds(rank.pid) - cpu[rank.number]) / elapsed
        lines += _where(rank, busy)
    lines += _in_calls([rank for rank in wait.waiting if rank not in suspects])
    if not suspects and not elsewhere:
        for rank in wait.waiting:
            lines += [f"  {rank.who}", *_stack(rank)]
    mentioned = {rank.number for rank in (*suspects, *wait.waiting)}
    for rank in ranks:
        if rank.number not in mentioned:
            lines += _where(rank, None)
    lines += told
    if elsewhere and not told:
        lines.append(f"  {elsewhere} of its {wait.size} ranks are on other nodes.")
    lines += straggler(ranks)
    lines.append(
        "Every rank must make the same calls. If one is only slow, allow more: MPISTRAT_STALL_SECONDS=N (0: no limit)."
    )
    return "\n".join(lines)


def death_report(ranks: list[Rank], first: Rank) -> str:
    lines = [f"{first.who} {describe_exit(first.status)}"]
    last = first.record.last(1)
    lines += (
        [f"  it {_last_words(first, last[0])}"] if last else ["  it had not entered a collective"]
    )
    spoken = _spoken_at_death(first)
    if spoken:
        lines += ["  its last words:", *(f"      {line}" for line in spoken)]
    others = [rank for rank in ranks if rank is not first]
    lines += _in_calls([rank for rank in others if rank.inside])
    for rank in others:
        if rank.inside or rank.has_left:
            continue
        last = rank.record.last(1)
        lines.append(
            f"  rank {rank.number}: {_last_words(rank, last[0]) if last else 'had not entered a collective'}"
        )
    if first.record.words[SIZE] > len(ranks) and first.status in _LAUNCHERS_SIGNALS:
        lines.append(
            "  If a rank of another node failed before, the launcher killed this one; each node reports for itself."
        )
    return "\n".join(lines)


def account_of(ranks: list[Rank]) -> list[str]:
    """What the ranks of a node do, for the report of another."""
    used = {rank.number: cpu_seconds(rank.pid) for rank in ranks}
    started = time.monotonic()
    time.sleep(_SECONDS_OF_CPU)
    inside = [rank for rank in ranks if rank.inside and not rank.stands_still]
    lines = []
    for rank in ranks:
        if rank not in inside:
            busy = (cpu_seconds(rank.pid) - used[rank.number]) / (time.monotonic() - started)
            lines += _where(rank, busy)
    return lines + _in_calls(inside)


def straggler(ranks: list[Rank]) -> list[str]:
    """Whom the others waited for in the last minute: the rank that waited least itself."""
    waited = sorted((rank.record.seconds_waited(), rank.number) for rank in ranks if not rank.dead)
    if len(waited) < 2 or waited[-1][0] - waited[0][0] < 1.0:
        return []
    return [
        f"  In the last minute before, rank {waited[0][1]} was the slowest: it waited {waited[0][0]:.1f} s for others, "
        f"rank {waited[-1][1]} waited {waited[-1][0]:.1f} s."
    ]


def _where(rank: Rank, busy: float | None) -> list[str]:
    """What a rank does that others miss."""
    if rank.dead:
        state = describe_exit(rank.status)
    elif rank.has_left:
        state = "has come to the end of its program"
    else:
        letter = state_of(rank.pid)
        state = f"is {describe_state(letter)}"
        if busy is not None and letter in {"R", "S"}:
            state = "is busy" if busy > _BUSY or letter == "R" else "is idle"
            state += f" ({100 * busy:.0f} % of a core)"
    last = rank.record.last(1)
    told = _last_words(rank, last[0]) if last else "has not entered a collective"
    return [f"  {rank.who} {state}; it {told}", *_stack(rank)]


def _last_words(rank: Rank, last: Entry) -> str:
    inside = any(board.base == last.board and board.since for board in rank.record.boards())
    ago = (time.monotonic_ns() - last.entered) / 1e9
    verb = "is in" if inside and not rank.dead else "was in" if inside else "had finished"
    return f"{verb} collective number {last.number}, entered {ago:.1f} s ago: {last.call}\n      at {last.site}"


def _stack(rank: Rank) -> list[str]:
    if rank.dead:
        return []
    words = rank.record.words
    frames = stack_of(rank.pid, words[STACK_SIGNAL], words[MAIN_THREAD], rank.stacks)
    return (
        ["    and stands (innermost call first)", *(f"      {f}" for f in frames[:_MOST_FRAMES])]
        if frames
        else []
    )


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


def _in_calls(ranks: list[Rank]) -> list[str]:
    """The collectives that ranks are in, those in the same one together."""
    calls: dict[str, list[Rank]] = {}
    for rank in ranks:
        last = rank.record.last(1)
        if last:
            text = f"in collective number {last[0].number}: {last[0].call}\n      at {last[0].site}"
            calls.setdefault(text, []).append(rank)
    return [
        f"  {_ranks(those)} {'waits' if len(those) == 1 else 'wait'} {text}"
        for text, those in calls.items()
    ]


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
