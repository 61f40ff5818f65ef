"""Reading ahead on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_SECONDS_BETWEEN_LOOKS = 0.1


class Prefetcher(Iterator[T], Generic[T]):
    """`iterator`'s items, of which up to `depth` are made before they are asked for, on another thread.

    An exception is raised where its item would have come. The thread ends with `close`, with this object, or with the
    program.
    """

    def __init__(self, iterator: Iterator[T], depth: int) -> None:
        self._made: queue.Queue[tuple[str, object]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._ended = False
        thread = threading.Thread(
            target=_make,
            args=(iterator, self._made, self._stop),
            name="mpistrat input",
            daemon=True,
        )
        thread.start()

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        kind, item = self._made.get()
        if kind == "item":
            return item  # type: ignore[return-value]
        self._ended = True
        if isinstance(item, BaseException):
            raise item
        raise StopIteration

    def close(self) -> None:
        self._stop.set()

    def __del__(self) -> None:
        self._stop.set()


def _make(
    iterator: Iterator[T], made: queue.Queue[tuple[str, object]], stop: threading.Event
) -> None:
    def put(kind: str, item: object) -> bool:
        while not stop.is_set():
            try:
                made.put((kind, item), timeout=_SECONDS_BETWEEN_LOOKS)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in iterator:
            if not put("item", item):
                return
    except BaseException as error:  # whatever it is, it belongs to the thread that asks
        put("end", error)
    else:
        put("end", None)
