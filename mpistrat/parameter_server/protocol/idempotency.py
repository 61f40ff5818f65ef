"""Servers make each update once, even if it arrives several times: clients number updates, servers remember numbers.

An update arrives again when a worker has died and another worker repeats its closure, a function that the coordinator
has scheduled. It also does when a server has died and its backup gets the request.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mpistrat.errors import FailedPreconditionError
from mpistrat.parameter_server.protocol.messages import InlineTensor, Update
from mpistrat.parameter_server.rpc.endpoint import outcome_of, value_of


def session_of(client: int) -> int:
    """Return the number of a client's session: its updates outside closures. Below 0, unlike ids of closures.

    Args: client: the client's rank.
    """
    return -1 - client


class UpdateNumbers:
    """Numbers a client's updates, so that servers recognize an update that arrives again.

    Args: session: the number of the client's session (its updates outside closures); None if servers have no backups,
        because no client then sends these updates again.
    """

    def __init__(self, session: int | None = None) -> None:
        # Backward passes on GPUs and the program's own threads also make updates.
        self._lock = threading.Lock()
        self._session = session
        self._numbers = itertools.count()
        self._open: set[int] = set()  # the first numbers of pushes that servers have not answered
        self._work: int | None = None
        self._made: Counter[int] = Counter()  # updates of the closure, by array

    @contextlib.contextmanager
    def within(self, work: int) -> Iterator[None]:
        """Inside, the updates of all threads belong to a closure, and their numbers begin at 0 for each array.

        A worker that repeats the closure gives its updates the same numbers. Called by: a worker, around each closure.

        Args: work: the closure's id.
        """
        with self._lock:
            self._work = work
            self._made.clear()
        try:
            yield
        finally:
            self._work = None

    def number(self, key: int) -> tuple[int | None, int]:
        """Return the fields `work` and `number` for the next `Update` of the array `key`.

        Inside `within`, `work` is the closure's id, and `number` counts the closure's earlier updates of this array.
        Outside, `work` is the session (a number below 0 for all of this client's updates outside closures), and
        `number` grows with each call. Without a session, the result is (None, 0).
        """
        with self._lock:
            if self._work is not None:
                number = self._made[key]
                self._made[key] = number + 1
                return self._work, number
            if self._session is None:
                return None, 0
            return self._session, next(self._numbers)

    @contextlib.contextmanager
    def push(self) -> Iterator[int]:
        """Surround a push (updates that the client sends together) until the servers have answered it.

        Entered before the updates get their numbers.

        Yields: `settled`, a number: the servers have answered all updates of the session with smaller numbers.
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


_Outcome = InlineTensor | Exception | None
_UpdateKey = tuple[int, int]  # array, number


class IdempotencyCache:
    """Remembers the outcomes of numbered updates on a server: values or errors."""

    def __init__(self) -> None:
        # By closure or session, then by update.
        self._outcomes: dict[int, dict[_UpdateKey, _Outcome]] = {}
        self._over_before = 0  # the id before which all closures have ended

    def __len__(self) -> int:
        return sum(len(outcomes) for outcomes in self._outcomes.values())

    def once(
        self, update: Update, name: str, make: Callable[[], InlineTensor | None]
    ) -> InlineTensor | None:
        """Make an update unless it was made before. Return, or raise, the outcome of `make` from the first time.

        An update without `work` is always made. An OSError is raised, and not remembered, because it means that the
        client has died with its memory. The update then arrives again, from another client.

        Args: name: the array's name, for the error.
        Raises: FailedPreconditionError if the update's closure is over; the error of `make`.
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
            if isinstance(outcome, OSError):
                raise outcome
            outcomes[which] = outcome
        return value_of(outcomes[which])

    def forget(self, over: Sequence[int], over_before: int) -> None:
        """Forget the outcomes of closures that no worker repeats: the ids in `over`, and the ids below `over_before`.

        Later updates of closures below `over_before` raise FailedPreconditionError in `once`.
        """
        self._over_before = max(self._over_before, over_before)
        # `over` may lack a closure that was begun repeatedly. Sessions have numbers below 0.
        ended = {*over}
        for work in [*self._outcomes]:
            if work in ended or 0 <= work < over_before:
                del self._outcomes[work]

    def settle(self, session: int, before: int) -> None:
        """Forget the outcomes of a session's updates with numbers below `before`, which the client never repeats."""
        outcomes = self._outcomes.get(session, {})
        for which in [*outcomes]:
            _, number = which
            if number < before:
                del outcomes[which]
