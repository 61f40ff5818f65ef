"""Reads ahead on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from mpistrat.arrays import default_device
from mpistrat.machine.devices import make_own_current

T = TypeVar("T")
# Entries are (item, None), and, at the end, (None, the exception that `next` raises).
_Made = queue.SimpleQueue[tuple[Any, BaseException | None]]


class Prefetcher(Iterator[T], Generic[T]):
    """An iterator over the items of `iterator`. Another thread reads `iterator`, at most `depth` items ahead.

    An exception of `iterator` is raised by `next` in place of an item; StopIteration follows. The thread ends when
    `iterator` ends, when this object is garbage-collected, or with the program.
    """

    def __init__(self, iterator: Iterator[T], depth: int) -> None:
        # Two SimpleQueues are faster than one queue.Queue of limited size.
        self._made: _Made = queue.SimpleQueue()
        self._room: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: make no more
        self._ended = False
        for _ in range(depth):
            self._room.put(True)
        threading.Thread(
            target=_make,
            args=(iterator, self._made, self._room, default_device()),
            name="mpistrat input",
            daemon=True,
        ).start()

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item, end = self._made.get()
        if end is not None:
            self._ended = True
            raise end
        self._room.put(True)
        return item

    def __del__(self) -> None:
        self._room.put(False)


def _make(
    iterator: Iterator[T],
    made: _Made,
    room: queue.SimpleQueue[bool],
    device: AbstractContextManager[object],
) -> None:
    make_own_current()
    try:
        # Datasets make their tensors on the default device of the program's thread.
        with device:
            for item in iterator:
                if not room.get():
                    return
                made.put((item, None))
    except BaseException as error:  # of any kind: `__next__` raises it on the program's thread
        made.put((None, error))
    else:
        made.put((None, StopIteration()))
