"""Closures that wait for workers, and what their errors do."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpistrat.errors import CancelledError
from mpistrat.parameter_server.coordinator.per_worker import Resource
from mpistrat.parameter_server.coordinator.remote_value import RemoteValue

MOST_QUEUED = 262_144  # as in TensorFlow
MOST_BYTES = 1 << 30  # of closures, pickled, that have not ended


@dataclass(eq=False)
class Closure:
    """A function and its arguments, for any worker to execute.

    Attributes:
        name: the function's.
        payload: function, positional and keyword arguments, pickled.
        resources: all that it needs of the worker.
        result: gets what the function returns or raises.
        internal: the coordinator's own: it goes first, and its error is raised to its caller alone.
        repeated: a worker that has died may have begun it, and what that worker sent may still arrive.
        id: set by the queue, from 1. Servers apply what a closure does once for its id, however often it is begun.
    """

    name: str
    payload: bytes
    resources: Sequence[Resource]
    result: RemoteValue
    internal: bool = False
    repeated: bool = False
    id: int = 0


class UnfinishedClosures(NamedTuple):
    """What nobody has waited for.

    Attributes:
        waiting: how many closures nobody had begun.
        under_way: how many may have been executed, or begun, or not.
        error: the first error of a closure, where nobody has raised it.
    """

    waiting: int
    under_way: int
    error: BaseException | None


class ClosureQueue:
    """First in, first out. All of its methods may be called by any thread.

    The queue keeps the first error of a closure. The next `put`, `wait` or `done` waits until the closures under way
    have ended, cancels those that wait, and raises the error, once.

    Args:
        most: how many may wait.
        most_bytes: of those that have not ended; one more is taken as long as they are fewer.
    Attributes:
        changed: notified when closures have ended.
        under_way: the closures that were taken and have not ended; others only read it.
    """

    def __init__(self, most: int = MOST_QUEUED, most_bytes: int = MOST_BYTES) -> None:
        self.changed = threading.Condition()
        self.under_way: set[Closure] = set()
        self._most, self._most_bytes = most, most_bytes
        self._bytes = 0
        self._waiting: collections.deque[Closure] = collections.deque()
        self._error: BaseException | None = None
        self._cancelling = False
        self._pauses = 0
        self._closed: Exception | None = None
        self._next = 1
        self._over: list[int] = []  # ids that `over` has not returned yet
        self._open: dict[int, None] = {}  # ids, in order

    def put(self, closure: Closure) -> None:
        """Waits while the queue is full. Raises: an earlier closure's error, or that there are no workers."""

        def has_room() -> bool:
            is_full = len(self._waiting) >= self._most or self._bytes >= self._most_bytes
            return not self._cancelling and (not is_full or self._closed is not None)

        with self.changed:
            self.changed.wait_for(has_room)
            if self._closed is None:
                closure.id, self._next = self._next, self._next + 1
                self._open[closure.id] = None
                self._bytes += len(closure.payload)
                (self._waiting.appendleft if closure.internal else self._waiting.append)(closure)
            if not closure.internal:
                self._raise_error()
            if self._closed is not None:
                raise self._closed.with_traceback(None)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def take(self, most: int) -> list[Closure]:
        """The next ones, which are under way from now on; none in a pause, and while others are being cancelled."""
        with self.changed:
            if self._cancelling or self._pauses:
                return []
            was_full = len(self._waiting) >= self._most
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self.under_way.update(taken)
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
                self.changed.wait_for(lambda: not self.under_way)
            yield
        finally:
            with self.changed:
                self._pauses -= 1

    def put_back(self, closures: Iterable[Closure]) -> None:
        """Closures that were under way and have not ended: the next ones again, as if they had never been taken."""
        with self.changed:
            closures = [*filter(self.under_way.__contains__, closures)]  # without those given up
            self.under_way.difference_update(closures)
            if self._error is not None:
                self._cancel(closures, self._error)
            else:
                self._waiting.extendleft(reversed(closures))
            self.changed.notify_all()

    def end(self, outcomes: Iterable[tuple[Closure, bytes | None, BaseException | None]]) -> None:
        """Closures that were under way, and what they returned or raised."""
        with self.changed:
            for closure, packed, error in outcomes:
                if closure not in self.under_way:  # given up
                    continue
                self.under_way.remove(closure)
                self._end(closure, packed, error)
                if error is not None and not closure.internal:
                    self._error = self._error or error
            self.changed.notify_all()

    def over(self, fewest: int = 1) -> tuple[list[int], int]:
        """Ids of closures that have ended since the last call, and the id before which all have ended.

        No ids where they would be fewer than `fewest`. Closures that were begun repeatedly count for the second only.
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

    def close(self, error: Exception) -> UnfinishedClosures:
        """No worker executes closures any more: all that have not ended, and those to come, fail with `error`."""
        with self.changed:
            unfinished = UnfinishedClosures(len(self._waiting), len(self.under_way), self._error)
            self._closed = error
            if not self._is_empty():
                self._error = self._error or error
            for closure in (*self.under_way, *self._waiting):
                self._end(closure, None, error)
            self.under_way.clear()
            self._waiting.clear()
            self.changed.notify_all()
        return unfinished

    def _is_empty(self) -> bool:
        return not self._waiting and not self.under_way

    def _raise_error(self) -> None:
        if self._error is None:
            return
        self._cancelling = True
        try:
            self.changed.wait_for(lambda: not self.under_way)
            error, self._error = self._error, None
            self._cancel(self._waiting, error)
            self._waiting.clear()
        finally:
            self._cancelling = False
            self.changed.notify_all()
        raise error.with_traceback(None)

    def _cancel(self, closures: Iterable[Closure], error: BaseException) -> None:
        because = f"{type(error).__name__}: {error}"
        for closure in closures:
            message = f"closure {closure.name} was cancelled, for another one raised {because:.300}"
            self._end(closure, None, CancelledError(message))

    def _end(self, closure: Closure, packed: bytes | None, error: BaseException | None) -> None:
        closure.result.put(packed, error)
        self._bytes -= len(closure.payload)
        if not closure.repeated:
            self._over.append(closure.id)
        del self._open[closure.id]
