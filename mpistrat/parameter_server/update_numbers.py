"""Numbers of a process's updates, by which servers know those that they have made."""

from __future__ import annotations

import itertools
import threading
from collections import Counter


def session_of(client: int) -> int:
    """The number of what a client asks for outside a piece of work; those of work are 0 or more."""
    return -1 - client


class UpdateNumbers:
    """
    Args: session: where requests are repeated to other servers, the number, below 0, of all that this process asks for
        outside a piece of work; None where nobody repeats that.
    """

    def __init__(self, session: int | None = None) -> None:
        # Backward passes on GPUs, and programs, have threads of their own.
        self._lock = threading.Lock()
        self._session = session
        self._numbers = itertools.count()
        self._open: set[int] = set()  # of the session, by the first of each push
        self._work: int | None = None
        self._made: Counter[int] = Counter()  # of the piece of work, by array

    def begin(self, work: int) -> None:
        """From now on all threads' updates are those of a piece of work, as when it was begun before."""
        with self._lock:
            self._work = work
            self._made.clear()

    def end(self) -> None:
        self._work = None

    def number(self, key: int) -> tuple[int | None, int]:
        """Of the next update of this array: the piece of work, or the session, and the number in it."""
        with self._lock:
            if self._work is None:
                return self._session, 0 if self._session is None else next(self._numbers)
            self._made[key] += 1
            return self._work, self._made[key] - 1

    def open(self) -> tuple[int, int]:
        """Before a push is numbered. Returns: what to close, once it is answered; what is settled by now."""
        with self._lock:
            if self._session is None:
                return 0, 0
            opened = next(self._numbers)
            self._open.add(opened)
            return opened, min(self._open)

    def close(self, opened: int) -> None:
        with self._lock:
            self._open.discard(opened)
