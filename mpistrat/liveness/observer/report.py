"""The observer's reports in words: the ranks that wait, the ranks that are missing, and the activity of each."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence

from mpistrat.errors import listed
from mpistrat.liveness import deadlines, processes
from mpistrat.liveness.observer.failure_detector import ObservedRank, Wait
from mpistrat.liveness.processes import (
    RUNS,
    catches,
    cpu_seconds,
    describe_exit,
    describe_state,
    state_of,
    text_in,
)
from mpistrat.liveness.records.record import CallEntry

_MOST_FRAMES = 12
_MOST_RANKS = 24  # the most ranks that a report describes one by one
_MOST_LISTED = 16  # the most ranks in a list of numbers
_BUSY = 0.1  # a rank that uses so much of a core is busy: it may have to share the core
# The function of `mpistrat run` that starts programs, through runpy.
_STARTS_PROGRAMS = "_run_as_main"
_RUNPY = re.compile(r"\brunpy(\.py)?>?:\d+ in ")


def stall_report(
    ranks: list[ObservedRank],
    wait: Wait,
    waited: float,
    missing_elsewhere: Iterable[int],
    lines_of_others: Sequence[str],
) -> str:
    """Return the report of a stall: the missing ranks, and the activity of all ranks, with stacks.

    Args:
        ranks: the ranks of this node, except lost ones.
        wait: the collective that has lasted too long.
        waited: seconds since the first rank entered it.
        missing_elsewhere: missing ranks on other nodes, as numbers in the job.
        lines_of_others: the lines of the other nodes' accounts; empty if they have not answered.
    """
    group = wait.slot.group
    elsewhere = wait.elsewhere
    suspects = wait.suspects
    allowed, more = _limit_of(wait)
    if elsewhere and not lines_of_others:
        lines_of_others = [f"  {elsewhere} of its {wait.slot.size} ranks are on other nodes."]
        rest = "all its ranks on this node have come to it, so some on other nodes have not"
    else:
        rest = "all ranks have come to it, but it does not end"
    why = _who_is_missing(wait, suspects, missing_elsewhere) or rest
    lines = [f"ranks have waited {waited:.1f} s in a collective ({allowed}): {why}"]
    lines += _what_they_do(suspects, group)
    lines += _in_calls(_without(wait.waiting, suspects), group)
    if not suspects and not elsewhere:
        for rank, stack in _ask_for_stacks(wait.waiting[:_MOST_RANKS]):
            lines += [f"  {rank.who}", *_stack(rank, stack)]
    others = _without(ranks, [*suspects, *wait.waiting])
    lines += _what_they_do(others, group)
    lines += lines_of_others
    lines += straggler([*wait.waiting, *wait.missing])
    lines.append(f"Every rank must make the same calls. If one is only slow, allow more: {more}.")
    return "\n".join(lines)


def _limit_of(wait: Wait) -> tuple[str, str]:
    """Return two texts: the limit that has passed, and the setting that allows more time."""
    limit = wait.record.limit
    if wait.limit != limit or 0 < wait.timeout <= limit:
        return f"the timeout of their group is {wait.timeout:g} s", "a longer timeout= of the group"
    return f"MPISTRAT_STALL_SECONDS allows {limit:g} s", "MPISTRAT_STALL_SECONDS=N (0: no limit)"


def _who_is_missing(wait: Wait, suspects: list[ObservedRank], elsewhere: Iterable[int]) -> str:
    """Return a text that names the missing ranks; if none is missing, the ranks that stand still in the collective.

    "" without any.

    Args:
        suspects: `wait.suspects`.
        elsewhere: missing ranks on other nodes, as numbers in the job.
    """
    here = [rank.number for rank in wait.missing]
    missing = sorted([*elsewhere, *here])
    if missing:
        have = "has" if len(missing) == 1 else "have"
        return f"{listed(missing, most=_MOST_LISTED)} {have} not come to it"
    if not suspects:
        return ""
    return f"{_ranks(suspects)} entered it, and does not go on"


def death_report(ranks: list[ObservedRank], first: ObservedRank) -> str:
    """Return the report of a death: how the rank `first` died, and the last collectives of the node's `ranks`."""
    how = _how_it_died(first)
    lines = [f"{first.who} {how}", f"  it {_last_words(first)}"]
    lines += _spoken_at_death(first)
    others = _without(ranks, [first])
    lines += _in_calls(others)
    working = (rank for rank in others if not (rank.inside or rank.record.has_left))
    lines += [f"  rank {rank.number}: {_last_words(rank)}" for rank in working]
    is_killed = first.status in processes.AS_LAUNCHERS_KILL
    if is_killed and first.record.size > len(ranks):
        lines.append(
            "  If a rank of another node failed before, the launcher killed this one; each node reports for itself."
        )
    return "\n".join(lines)


def _how_it_died(rank: ObservedRank) -> str:
    how = describe_exit(rank.status)
    if rank.became:
        return f"became another program, by exec ({rank.became}), and then {how}"
    if rank.closed_alive:
        return "closed files that it had not opened, as os.closerange() does, and died: it had lost its launcher"
    return how


def absence_report(absent: list[ObservedRank], waiting: list[ObservedRank]) -> str:
    """Return the report that the programs of the ranks `absent` have ended while `waiting` wait for all to start."""
    first, *more = absent
    how = first.record.end or (describe_exit(first.status) if first.dead else "came to its end")
    so_did = f" (so did {_ranks(more)})" if more else ""
    wait = _wait(waiting)
    return (
        f"{first.who} {how}{so_did}, but {_ranks(waiting)} {wait} for all ranks to start MPI, or to "
        "build the strategy.\nEvery rank must do so. Is the call inside an `if rank == 0:`, or did a rank end because "
        "it had nothing to do?"
    )


def account_of(ranks: list[ObservedRank]) -> list[str]:
    """Return lines about the activity of this node's ranks, for the report of another node. It takes up to 2 s."""
    inside = [rank for rank in ranks if rank.inside and not rank.stands_still]
    return _what_they_do(_without(ranks, inside)) + _in_calls(inside)


def leaving_notice(ranks: list[ObservedRank], gone: list[ObservedRank], seconds: float) -> str:
    """Return the notice that the programs of the ranks `gone` have ended and that these wait for the other ranks.

    It has the activity of the other ranks. The wait may be no failure.

    Args:
        ranks: all ranks of the node.
        seconds: how long the ranks `gone` have waited.
    """
    lines = [
        f"{_ranks(gone)} came to the end of the program {seconds:.0f} s ago and {_wait(gone)} for the other "
        "ranks. If one of these waits in turn, in an MPI call of the program's own, this job hangs:"
    ]
    return "\n".join(lines + _what_they_do(_without(ranks, gone)))


def straggler(ranks: list[ObservedRank]) -> list[str]:
    """Return a line about the slowest of `ranks` in the last minute: the rank that waited least for other ranks.

    Returns: [] if fewer than two ranks live, or if the longest and the shortest wait differ by less than 1 s.
    """
    living = [rank for rank in ranks if not rank.dead]
    if not living:
        return []
    waited = [(rank.record.seconds_waited(), rank.number) for rank in living]
    least, slowest = min(waited)
    most, other = max(waited)
    if most - least < deadlines.STRAGGLER_WAITED_LESS:
        return []
    return [
        f"  In the last minute before, rank {slowest} was the slowest: it waited {least:.1f} s for others, "
        f"rank {other} waited {most:.1f} s."
    ]


def _what_they_do(ranks: list[ObservedRank], group: int | None = None) -> list[str]:
    """Return lines for each rank, at most 24: whether it is busy, its last collective, and its stack.

    It takes 0.3 s, to measure CPU times, and up to 1.5 s until the ranks have answered.

    Args: group: prefer the last collective on this communicator (by the hash of its name); None: on any.
    """
    if not ranks:
        return []
    shown = ranks[:_MOST_RANKS]
    used = {rank: cpu_seconds(rank.pid) for rank in shown}
    started = time.monotonic()
    time.sleep(deadlines.OBSERVER_MEASURES_CPU_TIME)
    elapsed = time.monotonic() - started
    states = {rank: _state(rank, cpu, elapsed) for rank, cpu in used.items()}
    lines = []
    for rank, stack in _ask_for_stacks(shown):
        words = _last_words(rank, group)
        lines.append(f"  {rank.who} {states[rank]}; it {words}")
        lines += _stack(rank, stack)
    if len(ranks) > _MOST_RANKS:
        lines.append(f"  and {_ranks(ranks[_MOST_RANKS:])}")
    return lines


def _ask_for_stacks(ranks: list[ObservedRank]) -> list[tuple[ObservedRank, StackRequest]]:
    """Ask all `ranks` for their stacks, and return each rank with its `StackRequest`. Does not wait for the answers.

    All ranks are asked at the same time, so that all together have 1.5 s to answer. Dead ranks are not asked.
    """
    asked = []
    for rank in ranks:
        number = 0 if rank.dead else rank.record.stack_signal
        asked.append((rank, StackRequest(rank.pid, number, rank.stacks)))
    return asked


def _state(rank: ObservedRank, used: float, seconds: float) -> str:
    """Return a text about the rank's process: how it died, or whether it has ended, is stopped, busy or idle.

    Args: used: the CPU time in seconds that the process had used `seconds` ago.
    """
    busy = (cpu_seconds(rank.pid) - used) / seconds
    if rank.dead:
        return describe_exit(rank.status)
    if rank.record.has_left:
        return "has come to the end of its program"
    if program := rank.other_program:
        return f"has become another program, by exec: {program}"
    letter = rank.letter
    if letter not in ("R", "S"):
        return f"is {describe_state(letter)}"
    how = "busy" if busy > _BUSY or letter == "R" else "idle"
    return f"is {how} ({100 * busy:.0f} % of a core)"


def _last_words(rank: ObservedRank, group: int | None = None) -> str:
    """Return a text with the rank's last collective, and with the other collectives that the rank is in.

    Args: group: take the last collective on the communicator with this hash of its name; if there is none, or for
        None, the last collective on any communicator.
    """
    record = rank.record
    slots = record.slots()
    of_group = (record.entry_of(slot) for slot in slots if slot.group == group)
    last = next(of_group, None) or next(iter(record.last(1)), None)
    words = "has not entered a collective" if last is None else _describe(rank, last)
    for slot in slots:
        entry = record.entry_of(slot)
        if slot.since and entry and entry != last:
            words += f"\n    of another communicator it {_describe(rank, entry)}"
    return words


def _describe(rank: ObservedRank, entry: CallEntry) -> str:
    since_of = {slot.base: slot.since for slot in rank.record.slots()}
    ago = (time.monotonic_ns() - entry.entered) / 1e9
    verb = "had finished"
    if since_of.get(entry.slot):
        verb = "was in" if rank.dead else "is in"
    call = f"{entry.call}\n      at {entry.site}"
    return f"{verb} collective number {entry.number}, entered {ago:.1f} s ago: {call}"


def _stack(rank: ObservedRank, request: StackRequest) -> list[str]:
    if not request.sent or rank.stands_still:
        return []
    frames = _of_the_program(request.frames())
    if not frames:
        return ["    and did not answer when it was asked for its stack"]
    return ["    and stands (innermost call first)", *(f"      {f}" for f in frames[:_MOST_FRAMES])]


def _of_the_program(frames: list[str]) -> list[str]:
    """Return the frames, the innermost first, without the outer frames of `mpistrat run`, if it started the program."""
    end = f" in {_STARTS_PROGRAMS}"
    for number, frame in enumerate(frames):
        if frame.endswith(end):
            inner = frames[:number]
            while inner and _RUNPY.search(inner[-1]):
                del inner[-1]
            return inner
    return frames


def _spoken_at_death(rank: ObservedRank) -> list[str]:
    """Return the lines that faulthandler wrote when a fatal signal killed the rank; [] without any."""
    _, found, after = text_in(rank.stacks).rpartition("Fatal Python error")
    if not found:
        return []
    lines = (found + after).splitlines()[:_MOST_FRAMES]
    return ["  its last words:", *(f"      {line.rstrip()}" for line in lines)]


def _in_calls(ranks: list[ObservedRank], group: int | None = None) -> list[str]:
    """Return a line for each collective that some of `ranks` are in, with these ranks; [] if no rank is in one.

    Args: group: only collectives on the communicator with this hash of its name; None: on all communicators.
    """
    calls: dict[str, list[ObservedRank]] = {}
    for rank in ranks:
        for slot in rank.record.slots():
            if not slot.since or group not in (None, slot.group):
                continue
            entry = rank.record.entry_of(slot)  # None if other threads have made 64 calls since
            text = f"in collective number {slot.calls}"
            if entry:
                text = f"in collective number {entry.number}: {entry.call}\n      at {entry.site}"
            calls.setdefault(text, []).append(rank)
    lines = []
    for text, inside in calls.items():
        wait = _wait(inside)
        lines.append(f"  {_ranks(inside)} {wait} {text}")
    return lines


def _without(ranks: list[ObservedRank], others: list[ObservedRank]) -> list[ObservedRank]:
    return [rank for rank in ranks if rank not in others]


def _wait(ranks: list[ObservedRank]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _ranks(ranks: list[ObservedRank]) -> str:
    numbers = sorted(rank.number for rank in ranks)
    return listed(numbers, most=_MOST_LISTED)


class StackRequest:
    """Asks a process for the Python frames of its main thread, by a signal that the constructor sends.

    The process must have registered the signal with faulthandler, see `observation.speak_on_signal`. The handler is in
    C, and answers even while the GIL is held. A process that does not catch the signal is not asked, because the signal
    would kill it; a stopped or dead process is not asked, either.

    Args:
        stack_signal: the signal's number; 0: do not ask.
        stacks: the path of the file to which faulthandler appends the stack.
    Attributes: sent: whether the process was asked.
    """

    def __init__(self, pid: int, stack_signal: int, stacks: str) -> None:
        self._stacks = stacks
        self._before = 0  # bytes in the file before the request
        self.sent = False
        self._deadline = time.monotonic() + deadlines.OBSERVER_WAITS_FOR_STACK
        if stack_signal and state_of(pid) in RUNS and catches(pid, stack_signal):
            with contextlib.suppress(OSError):
                self._before = os.path.getsize(stacks)
                os.kill(pid, stack_signal)
                self.sent = True

    def frames(self) -> list[str]:
        """Wait for the answer, and return its frames, "train.py:33 in main", the innermost first.

        Returns: [] if the process was not asked, or does not answer within 1.5 s after the request.
        """
        answer = ""
        while self.sent:
            before = answer
            answer = self._answer()
            # A process without a core may stop in the middle of its answer. Read the file before a look at the
            # deadline, because the observer may have waited for other processes until now.
            is_complete = answer == before and bool(_frames(answer))
            if is_complete or time.monotonic() > self._deadline:
                break
            time.sleep(deadlines.OBSERVER_SLEEPS_UNTIL_STACK)
        return _frames(answer)

    def _answer(self) -> str:
        with open(self._stacks, encoding="utf-8", errors="replace") as file:
            file.seek(self._before)
            return file.read()


def _frames(dump: str) -> list[str]:
    """Return the frames in faulthandler's output for one thread, the innermost first."""
    found = re.findall(r'^\s+File "(.*)", line (\d+) in (.*)', dump, re.MULTILINE)
    return [f"{file}:{line} in {function}" for file, line, function in found]
