"""`ExitCoordinator`: decides whether the job must end, because a rank waits for a rank that has left.

Each rank reports to the exit coordinator of its group when its program ends, and when it has waited for a while inside
a collective. All ranks of a communicator must enter each collective on it. So the job is over exactly if a rank has
ended after fewer collectives on a communicator than another rank has entered. A rank that still works alone, however
long, does not end the job.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.errors import listed
from mpistrat.liveness import deadlines
from mpistrat.liveness.records.watch import has_not_come

_ADVICE = (
    "Every rank must make the same calls. Did it skip some: another number of batches, a `return` or sys.exit()"
    " for one rank only, an `if rank == 0:` around a collective?"
)


@dataclass(frozen=True)
class Left:
    """A message to the exit coordinator: the program of a rank has ended.

    Attributes:
        rank: the rank's number in the job.
        who: a description of the rank for messages.
        how: how its program ended, a sentence without its subject: "called sys.exit(3) at train.py:7".
        code: the program's exit code.
        calls: from a communicator's name to the number of collectives that the rank has entered on it.
    """

    rank: int
    who: str
    how: str
    code: int
    calls: dict[str, int]


@dataclass(frozen=True)
class Waits:
    """A message to the exit coordinator: a rank has been inside a collective for more than 0.5 s.

    Attributes:
        who: a description of the rank for messages.
        communicator: the communicator's name.
        call: number of the collective on the communicator, from 1.
        collective: a description of the collective, and the line of the program that called it.
        raised: traceback and advice of the error that the rank raises instead of making the collective; else the
            notice that a rank has left out a call; "" without either.
    """

    who: str
    communicator: str
    call: int
    collective: str
    raised: str = ""


class ExitCoordinator:
    """Decides whether the job must end, from the messages of a group's ranks. `JobEnd` then ends it.

    Args: size: number of the group's ranks; 0 on ranks other than its rank 0: they get no messages.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._left: dict[int, Left] = {}
        self._furthest: dict[str, Waits] = {}
        self._first_failure: tuple[float, Left] | None = None

    def receive(self, message: Left | Waits, now: float) -> None:
        if isinstance(message, Left):
            self._left[message.rank] = message
            if message.code and self._first_failure is None:
                self._first_failure = now, message
        else:
            name = message.communicator
            known = self._furthest.get(name, message)
            self._furthest[name] = max(known, message, key=lambda waits: waits.call)

    def all_left(self) -> bool:
        return len(self._left) == self._size

    def verdict(self, now: float) -> tuple[str, int] | None:
        """Return why the job must end now (a text for people), and the exit code to end it with.

        It must end if a rank has ended its program and is missing in another rank's collective, or if other ranks still
        work 1 s after a rank ended with an exit code other than 0. The exit code is the first such code; 1 if all
        missing ranks have ended with 0.

        Args: now: the time by `time.monotonic()`, as for `receive`.
        Returns: None while the job need not end, and when the programs of all ranks have ended.
        """
        if self.all_left():
            return None
        for name, waits in self._furthest.items():
            missing = []
            for left in self._left.values():
                made = left.calls.get(name)
                if has_not_come(made, waits.call):
                    missing.append(left)
            if missing:
                codes = (left.code for left in missing if left.code)
                return _never_comes(missing, waits), next(codes, 1)
        if self._first_failure is not None:
            since, left = self._first_failure
            if now - since > deadlines.COORDINATOR_WAITS_FOR_JOINT_EXITS:
                working = self._size - len(self._left)
                text = f"{left.who} {left.how} while {working} of {self._size} ranks still worked"
                return text, left.code
        return None


def _never_comes(missing: list[Left], waits: Waits) -> str:
    first, *more = missing
    others = ""
    if more:
        ranks = [left.rank for left in more]
        others = f" (so did {listed(ranks, most=8)})"
    made = first.calls[waits.communicator]
    advice = waits.raised or _ADVICE
    return (
        f"{first.who} {first.how}{others}, but another rank waits for it in a collective.\n"
        f"  rank {first.rank}: left after collective number {made}\n"
        f"  {waits.who}: in collective number {waits.call}, {waits.collective}\n{advice}"
    )
