"""Updates are made once, however often they come: clients number them, and servers remember the numbers.

An update comes again when a worker has died and another one repeats its work, or when a server has died and its backup
gets the request.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mpistrat.errors import FailedPreconditionError
from mpistrat.parameter_server.protocol.messages import InlineTensor, Update
from mpistrat.parameter_server.rpc.endpoint import outcome_of


def session_of(client: int) -> int:
    """The number of a client's session: all its updates outside pieces of work, whose numbers are 0 or more."""
    return -1 - client


class UpdateNumbers:
    """Numbers a client's updates.

    Args: session: the number of the client's session, if updates outside pieces of work may come again; otherwise None.
    """

    def __init__(self, session: int | None = None) -> None:
        # Backward passes on GPUs, and programs, have threads of their own.
        self._lock = threading.Lock()
        self._session = session
        self._numbers = itertools.count()
        self._open: set[int] = set()  # the first numbers of pushes that are not answered
        self._work: int | None = None
        self._made: Counter[int] = Counter()  # updates of the piece of work, by array

    @contextlib.contextmanager
    def within(self, work: int) -> Iterator[None]:
        """Inside, the updates of all threads belong to a piece of work, and are numbered as when it was begun before.

        Args: work: its number, which grows.
        """
        with self._lock:
            self._work = work
            self._made.clear()
        try:
            yield
        finally:
            self._work = None

    def number(self, key: int) -> tuple[int | None, int]:
        """For the next update of this array: the piece of work, or the session, and the number in it."""
        with self._lock:
            if self._work is None:
                return self._session, 0 if self._session is None else next(self._numbers)
            self._made[key] += 1
            return self._work, self._made[key] - 1

    @contextlib.contextmanager
    def push(self) -> Iterator[int]:
        """Surrounds a push, from before its updates are numbered until it is answered.

        Yields: the number before which all updates of the session are answered.
        """
        with self._lock:
            opened = 0 if self._session is None else next(self._numbers)
            self._open.add(opened)
            settled = min(self._open)
        try:
            yield settled
        finally:
            with self._lock:
                self._open.discard(opened)


class IdempotencyCache:
    """What came of numbered updates on a server: their values, or the errors for which they could not be made."""

    def __init__(self) -> None:
        # By piece of work, then array and number.
        self._outcomes: dict[int, dict[tuple[int, int], InlineTensor | Exception | None]] = {}
        self._over_before = 0  # pieces of work

    def __len__(self) -> int:
        return sum(map(len, self._outcomes.values()))

    def once(
        self, update: Update, name: str, make: Callable[[], InlineTensor | None]
    ) -> InlineTensor | None:
        """What `make` returns or raises, now or when it was called for this update.

        Args: name: of the array.
        """
        if update.work is None:
            return make()
        if 0 <= update.work < self._over_before:
            raise FailedPreconditionError(
                f"an update of {name!r} came after the work that it belongs to was over"
            )
        outcomes = self._outcomes.setdefault(update.work, {})
        which = update.key, update.number
        if which not in outcomes:
            outcome = outcome_of(make)
            if isinstance(outcome, OSError):  # the client has died, with its memory
                raise outcome  # and the update comes again
            outcomes[which] = outcome
        found = outcomes[which]
        if isinstance(found, Exception):
            raise found
        return found

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Nobody repeats the pieces of work `over` any more, nor any with a number below `over_before`."""
        self._over_before = max(self._over_before, over_before)
        # `over` may lack a piece of work that was begun repeatedly. Sessions have numbers below 0.
        gone = {*over, *(work for work in self._outcomes if 0 <= work < over_before)}
        for work in gone & self._outcomes.keys():
            del self._outcomes[work]

    def settle(self, session: int, before: int) -> None:
        """Nobody repeats the session's updates with numbers below `before`."""
        outcomes = self._outcomes.get(session, {})
        for which in [which for which in outcomes if which[1] < before]:
            del outcomes[which]
