"""The queue of closures that wait for workers."""

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
MOST_BYTES = 1 << 30  # of pickled closures that have not ended


@dataclass(eq=False)
class Closure:
    """A function and its arguments, for any worker to execute.

    Attributes:
        payload: the function, its positional and its keyword arguments, pickled.
        resources: the resources that the worker needs for it.
        result: gets the function's result or error.
        internal: whether the coordinator itself makes the closure. It goes first, and only `result` gets its error.
        repeated: whether a worker that has died may have begun the closure; messages of that worker may still arrive.
        id: a number from 1, set by the queue. Servers make each update of a closure once, even if several workers begin
            the closure.
    """

    name: str
    payload: bytes
    resources: Sequence[Resource]
    result: RemoteValue
    internal: bool = False
    repeated: bool = False
    id: int = 0


class UnfinishedClosures(NamedTuple):
    """The closures that had not ended when the queue was closed.

    Attributes:
        waiting: the number of closures that no worker had got.
        under_way: the number of closures that workers had got, and may or may not have executed.
        error: the first error that no call has raised; None if there is none.
    """

    waiting: int
    under_way: int
    error: BaseException | None


class ClosureQueue:
    """Closures (scheduled functions) that wait for workers, first in, first out. Called by: any thread.

    The queue keeps the first error of a closure. The next `put`, `wait` or `done` waits until the closures under way
    have ended, cancels the waiting closures, and raises the error, once.

    Args:
        most: the number of closures that may wait.
        most_bytes: `put` waits while the unfinished closures have this many pickled bytes or more.
    Attributes:
        changed: the condition that is notified when closures have ended or the queue has room.
        under_way: the closures that were taken and have not ended; other code only reads it.
    """

    def __init__(self, most: int = MOST_QUEUED, most_bytes: int = MOST_BYTES) -> None:
        self.changed = threading.Condition()
        self.under_way: set[Closure] = set()
        self._most = most
        self._most_bytes = most_bytes
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
        """Wait until the queue has room, append a closure, and set its id. An internal closure goes to the front.

        Raises: the error of an earlier closure, unless this closure is internal: after the closures under way have
            ended, this closure is cancelled with all waiting ones. After `close(error)`, that error.
        """

        def has_room() -> bool:
            if self._cancelling:
                return False
            if self._closed is not None:
                return True
            is_full = len(self._waiting) >= self._most
            return not is_full and self._bytes < self._most_bytes

        with self.changed:
            self.changed.wait_for(has_room)
            if self._closed is None:
                closure.id = self._next
                self._next += 1
                self._open[closure.id] = None
                self._bytes += len(closure.payload)
                if closure.internal:
                    self._waiting.appendleft(closure)
                else:
                    self._waiting.append(closure)
            if not closure.internal:
                self._raise_error()
            if self._closed is not None:
                raise self._closed.with_traceback(None)

    def __len__(self) -> int:
        """Return the number of waiting closures."""
        return len(self._waiting)

    def take(self, most: int) -> list[Closure]:
        """Remove up to `most` closures from the front, and return them; they are under way from now on.

        Returns: the closures, in order; [] inside `paused`, while an error is being raised, and if no closure waits.
        """
        with self.changed:
            if self._cancelling or self._pauses:
                return []
            was_full = len(self._waiting) >= self._most
            number = min(most, len(self._waiting))
            taken = [self._waiting.popleft() for _ in range(number)]
            self.under_way.update(taken)
            if was_full:
                self.changed.notify_all()
            return taken

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until no closure is under way (taken and not ended); inside, `take` returns [].

        Called by: `ClusterCoordinator.paused`, around a checkpoint.
        """
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
        """Put closures that were under way back to the front of the queue, as if no worker had taken them.

        If the queue keeps an error of a closure, cancel `closures` instead. Closures that have ended are ignored.
        """
        with self.changed:
            # Without the closures that `close` has ended.
            closures = [closure for closure in closures if closure in self.under_way]
            self.under_way.difference_update(closures)
            if self._error is not None:
                self._cancel(closures, self._error)
            else:
                self._waiting.extendleft(reversed(closures))
            self.changed.notify_all()

    def end(self, outcomes: Iterable[tuple[Closure, bytes | None, BaseException | None]]) -> None:
        """End closures that were under way, and set their results.

        Args: outcomes: for each closure its pickled result and its error; one of the two is None.
        """
        with self.changed:
            for closure, packed, error in outcomes:
                if closure not in self.under_way:  # `close` has ended it
                    continue
                self.under_way.remove(closure)
                self._end(closure, packed, error)
                if error is not None and not closure.internal:
                    self._error = self._error or error
            self.changed.notify_all()

    def over(self, fewest: int = 1) -> tuple[list[int], int]:
        """Return the ids of closures that have ended since the last call, and the lowest id that has not ended.

        If all have ended, the second number is the id that the next closure will get.
        The list lacks closures that two workers may have begun, because the dead worker's messages may still arrive. If
        it would have fewer than `fewest` ids, the list is [], and a later call returns these ids.
        """
        with self.changed:
            over_before = next(iter(self._open), self._next)
            if len(self._over) < fewest:
                return [], over_before
            over = self._over
            self._over = []
            return over, over_before

    def wait(self) -> None:
        """Wait until all closures have ended.

        Raises: the first error of a closure, once, after cancelling the closures that wait.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: not self._cancelling and (self._error is not None or self._is_empty())
            )
            self._raise_error()

    def done(self) -> bool:
        """Whether all closures have ended.

        Raises: the first error of a closure, once, after cancelling the closures that wait.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self._cancelling)
            self._raise_error()
            return self._is_empty()

    def close(self, error: Exception) -> UnfinishedClosures:
        """Fail all unfinished closures with `error`; later calls of `put` raise it.

        Called by: the dispatcher, when no worker can execute closures any more.
        Returns: how many closures were unfinished, and the error that no call had raised yet.
        """
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
            error = self._error
            self._error = None
            self._cancel(self._waiting, error)
            self._waiting.clear()
        finally:
            self._cancelling = False
            self.changed.notify_all()
        raise error.with_traceback(None)

    def _cancel(self, closures: Iterable[Closure], error: BaseException) -> None:
        because = f"{type(error).__name__}: {error}"
        for closure in closures:
            message = f"closure {closure.name} was cancelled because another raised {because:.300}"
            self._end(closure, None, CancelledError(message))

    def _end(self, closure: Closure, packed: bytes | None, error: BaseException | None) -> None:
        closure.result.put(packed, error)
        self._bytes -= len(closure.payload)
        if not closure.repeated:
            self._over.append(closure.id)
        del self._open[closure.id]
