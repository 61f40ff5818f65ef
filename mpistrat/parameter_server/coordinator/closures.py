"""Closures that wait for workers, and what their errors do."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpistrat.errors import CancelledError
from mpistrat.parameter_server.coordinator.remote_value import RemoteValue
from mpistrat.parameter_server.coordinator.resources import Resource

MOST_QUEUED = 262_144  # as in TensorFlow
MOST_BYTES = 1 << 30  # of closures, pickled, that have not ended


@dataclass(eq=False)
class Closure:
    """A function and its arguments, for any worker to execute.

    Attributes:
        name: the function's.
        payload: function, positional and keyword arguments, pickled.
        resources: of what it needs of the worker.
        result: whom what it returns, or raises, is given to.
        asked_alone: it is the coordinator's own: nobody but its caller is told of its error, and it goes first.
        repeated: a worker that has died may have begun it; what that one has sent may still come.
        id: from 1, by the queue; for servers, which apply what it does once, however often it is begun.
    """

    name: str
    payload: bytes
    resources: Sequence[Resource]
    result: RemoteValue
    asked_alone: bool = False
    repeated: bool = False
    id: int = 0


class Unfinished(NamedTuple):
    """What nobody has waited for.

    Attributes:
        waiting: how many closures nobody had begun.
        under_way: how many may have been executed, or begun, or not.
        error: the first one of a closure, where nobody has raised it.
    """

    waiting: int
    under_way: int
    error: BaseException | None


class ClosureQueue:
    """First in, first out. All of its methods may be called by any thread.

    The first error of a closure is kept, and raised by the next `put`, `wait` or `done`, once: when those under way
    have ended, and those that wait have been cancelled.

    Args:
        most: how many may wait.
        most_bytes: of those that have not ended; one more is taken as long as they are fewer.
    Attributes: changed: notified when closures have ended.
    """

    def __init__(self, most: int = MOST_QUEUED, most_bytes: int = MOST_BYTES) -> None:
        self.changed = threading.Condition()
        self._most, self._most_bytes = most, most_bytes
        self._bytes = 0
        self._waiting: collections.deque[Closure] = collections.deque()
        self._under_way: set[Closure] = set()
        self._error: BaseException | None = None
        self._cancelling = False
        self._pauses = 0
        self._closed: Exception | None = None
        self._next = 1
        self._over: list[int] = []  # ids that nobody was told of
        self._open: collections.OrderedDict[int, None] = collections.OrderedDict()  # ids, in order

    def put(self, closure: Closure) -> None:
        """Waits while the queue is full. Raises: an earlier closure's error, or that there are no workers."""
        with self.changed:
            self.changed.wait_for(self._has_room)
            if self._closed is None:
                closure.id, self._next = self._next, self._next + 1
                self._open[closure.id] = None
                self._bytes += len(closure.payload)
                if closure.asked_alone:
                    self._waiting.appendleft(closure)
                else:
                    self._waiting.append(closure)
            if not closure.asked_alone:
                self._raise_error()
            if self._closed is not None:
                raise self._closed.with_traceback(None)

    def _has_room(self) -> bool:
        is_full = len(self._waiting) >= self._most or self._bytes >= self._most_bytes
        return not self._cancelling and (not is_full or self._closed is not None)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        """How many have been taken, and have not ended."""
        return len(self._under_way)

    def take(self, most: int) -> list[Closure]:
        """The next ones, which are under way from now on; none in a pause, and while others are being cancelled."""
        with self.changed:
            if self._cancelling or self._pauses:
                return []
            was_full = len(self._waiting) >= self._most
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._under_way.update(taken)
            if was_full and taken:
                self.changed.notify_all()
            return taken

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no closure is under way: those that are have ended before."""
        with self.changed:
            self._pauses += 1
        try:
            with self.changed:
                self.changed.wait_for(lambda: not self._under_way)
            yield
        finally:
            with self.changed:
                self._pauses -= 1

    def put_back(self, closures: Sequence[Closure]) -> None:
        """Closures that were under way and have not ended: the next ones again, as if they had never been taken."""
        with self.changed:
            closures = [one for one in closures if one in self._under_way]  # not given up
            self._under_way.difference_update(closures)
            if self._error is not None:
                self._cancel(closures)
            else:
                self._waiting.extendleft(reversed(closures))
            self.changed.notify_all()

    def end(self, outcomes: Iterable[tuple[Closure, bytes | None, BaseException | None]]) -> None:
        """Closures that were under way, and what they returned or raised."""
        with self.changed:
            for closure, packed, error in outcomes:
                if closure not in self._under_way:  # given up
                    continue
                self._under_way.remove(closure)
                self._end(closure, packed, error)
                if error is not None and self._error is None and not closure.asked_alone:
                    self._error = error
            self.changed.notify_all()

    def over(self, fewest: int = 1) -> tuple[list[int], int]:
        """Ids of closures that have ended since this was called last, and the id before which all have.

        No ids where they would be fewer than `fewest`. Those that were begun repeatedly are only before the latter.
        """
        with self.changed:
            over_before = next(iter(self._open), self._next)
            if len(self._over) < fewest:
                return [], over_before
            over, self._over = self._over, []
            return over, over_before

    def wait(self) -> None:
        """Until all closures have ended. Raises: the error of one."""
        with self.changed:
            self.changed.wait_for(
                lambda: not self._cancelling and (self._error is not None or self._is_empty())
            )
            self._raise_error()

    def done(self) -> bool:
        """Whether all closures have ended. Raises: the error of one."""
        with self.changed:
            self.changed.wait_for(lambda: not self._cancelling)
            self._raise_error()
            return self._is_empty()

    def close(self, error: Exception) -> Unfinished:
        """Nobody takes closures any more, or tells of those under way: all have failed, and so will those to come."""
        with self.changed:
            unfinished = Unfinished(len(self._waiting), len(self._under_way), self._error)
            self._closed = error
            if self._error is None and not self._is_empty():
                self._error = error
            self._give_up([*self._under_way, *self._waiting], lambda _: error)
            self._under_way.clear()
            self._waiting.clear()
            self.changed.notify_all()
        return unfinished

    def _is_empty(self) -> bool:
        return not self._waiting and not self._under_way

    def _raise_error(self) -> None:
        if self._error is None:
            return
        self._cancelling = True
        try:
            self.changed.wait_for(lambda: not self._under_way)
            self._cancel(self._waiting)
            self._waiting.clear()
            error, self._error = self._error, None
        finally:
            self._cancelling = False
            self.changed.notify_all()
        raise error.with_traceback(None)

    def _cancel(self, closures: Iterable[Closure]) -> None:
        because = f"{type(self._error).__name__}: {self._error}"
        self._give_up(
            closures,
            lambda closure: CancelledError(
                f"closure {closure.name} was cancelled, for another one raised {because:.300}"
            ),
        )

    def _give_up(self, closures: Iterable[Closure], error: Callable[[Closure], Any]) -> None:
        for closure in closures:
            self._end(closure, None, error(closure))

    def _end(self, closure: Closure, packed: bytes | None, error: BaseException | None) -> None:
        closure.result.put(packed, error)
        self._bytes -= len(closure.payload)
        if not closure.repeated:
            self._over.append(closure.id)
        del self._open[closure.id]
