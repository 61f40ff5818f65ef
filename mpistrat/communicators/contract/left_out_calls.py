"""Finds a call that one rank has left out, by the lines of the program that make the ranks' calls.

The calls of such a rank meet the next calls of the other ranks. If these are equal (operation, dtype, shape, label), no
collective fails, but its result mixes values of different lines. The lines show it: where one rank is at one call, the
other rank comes at its next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from mpistrat.liveness.records.watch import CommunicatorWatch

# In a loop of two lines, ranks that make the calls in another order look as if one had left out a call, at first.
_STEPS_IN_LOOP = 3


def find_left_out(watch: CommunicatorWatch, *ranks: tuple[int, Sequence[str]]) -> bool:
    """Find out whether one of two ranks has left out a call, and set `left_out` of `watch` to the notice of it.

    Args: ranks: the result of `RankRecord.lines_on` of each of the two ranks.
    Returns: whether this is the first call that is found.
    """
    for (made, own), (left, others) in (ranks, ranks[::-1]):
        lines = left_out(own, others)
        if lines is not None and not watch.left_out:
            watch.left_out = (
                f"rank {left} left out the call at {lines[0]}: rank {made} made it together with rank {left}'s call at "
                f"{lines[1]}. Every result since then mixes values of two lines of the program. Let all ranks make the "
                "same calls, in the same order"
            )
            return True
    return False


def left_out(mine: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the line of the first call that the other rank has left out, and the line that it called at instead.

    A single call on different lines shows nothing, because a program may have a branch for one rank. Two in a row show
    it if this rank comes to where the other rank was, and the other rank goes on to a third line. In a loop of these
    lines four in a row show it. In either case the ranks made the call before these calls on one line.

    Args: mine, others: the lines of two ranks' last calls, the latest first. Lines of one index met in a collective.
    Returns: None if no call is known to be left out by the other rank.
    """
    # A line may make several calls.
    pairs = [pair for pair, _ in groupby(zip(mine, others, strict=False))]
    steps = 0
    for (line, other), (earlier, earlier_other) in pairwise(pairs):
        if line != earlier_other or line == other or earlier == earlier_other:
            break
        steps += 1
    if steps == 0:
        return None
    first = pairs[steps]
    before = pairs[steps + 1 : steps + 2]
    were_together = len(set().union(*before)) < 2
    lines = set().union(*pairs[: steps + 1])
    # The other rank makes its calls as before, but for one that it makes twice.
    if len(lines) < steps + 2:
        _, instead = first
        were_together = steps >= _STEPS_IN_LOOP and (instead, instead) in before
    return first if were_together else None
