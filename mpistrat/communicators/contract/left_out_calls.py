"""Finds a call that one rank has left out, by the lines of the program that make the ranks' calls.

The calls of such a rank meet the next calls of the other ranks. If these are equal (operation, dtype, shape, label), no
collective fails, but its result mixes values of different lines. The lines show it: where one rank is at one call, the
other rank comes at its next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mpistrat.liveness.records.record import CallEntry

# A rank's number in the job, and its last calls on a communicator, by their numbers.
CallsOfRank: TypeAlias = tuple[int, dict[int, CallEntry]]
# In a loop of few lines, ranks that make the calls in another order look as if one had left out a call, at first.
_STEPS_IN_LOOP = 3


def notice_of(first: CallsOfRank, second: CallsOfRank) -> str:
    """Return a notice if one of two ranks has left out a call that the other rank has made; else ""."""
    numbers = sorted(first[1].keys() & second[1].keys())
    latest = first[1][numbers[-1]]
    if latest.call.startswith("barrier"):  # it has no result
        return ""
    for (made, own), (left, others) in ((first, second), (second, first)):
        lines = left_out([own[n].site for n in numbers], [others[n].site for n in numbers])
        if lines is not None:
            return (
                f"rank {left} left out the call at {lines[0]}: rank {made} made it together with rank {left}'s call at "
                f"{lines[1]}. Every result since then mixes values of two lines of the program. Let all ranks make the "
                "same calls, in the same order"
            )
    return ""


def left_out(mine: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the line of the first call that the other rank has left out, and the line that it called at instead.

    A single call on different lines shows nothing, because a program may have a branch for one rank. Two in a row show
    it if this rank comes to where the other rank was, and the other rank goes on to a third line. In a loop of these
    lines four in a row show it, if both ranks have made calls together on all of these lines before. In either case
    the ranks made the call before these calls on one line.

    Args: mine, others: the lines of two ranks' last calls; the calls with the same index met in one collective.
    Returns: None if no call is known to be left out by the other rank.
    """
    pairs: list[tuple[str, str]] = []
    for pair in zip(mine, others, strict=True):
        if pairs[-1:] != [pair]:  # a line may make several calls
            pairs.append(pair)
    first = len(pairs) - 1
    while first > 0 and _is_shifted(pairs[first - 1], pairs[first]):
        first -= 1
    before = pairs[:first]
    shifted = pairs[first:]
    if before and before[-1][0] != before[-1][1]:
        return None
    steps = len(shifted) - 1
    lines = {line for pair in shifted for line in pair}
    if steps > 0 and len(lines) == steps + 2:
        return shifted[0]
    together = {line for line, other in before if line == other}
    if steps >= _STEPS_IN_LOOP and lines <= together and shifted[0][1] == before[-1][1]:
        return shifted[0]
    return None


def _is_shifted(earlier: tuple[str, str], later: tuple[str, str]) -> bool:
    """Whether this rank comes to the line where the other rank was, and that rank is on another line each time."""
    was_apart = earlier[0] != earlier[1]
    is_apart = later[0] != later[1]
    return was_apart and is_apart and later[0] == earlier[1]
