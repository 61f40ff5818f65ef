"""A table: an array in memory that its server writes, while other processes of the node read it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.node.shared_memory import before_others_see
from mpistrat.parameter_server.protocol.messages import SharedTensor, TensorSpec
from mpistrat.parameter_server.rpc.segments import Segments
from mpistrat.variables.updates import update_in_place

# Bytes before the array. Their first two int64 count the begins and ends of writes, and the updates.
_HEADER = 64
_TURN = 0
_UPDATES = 1
_ATTEMPTS = 3
_SECONDS_FOR_AN_UPDATE = 0.02
_PAUSE = 50e-6

T = TypeVar("T")


class Table:
    """An array that a server writes, in memory that other processes of the node map and read.

    Attributes:
        handle: names the whole memory, for processes that read it as a `MappedTable`: a header of 64 bytes (it counts
            updates, and shows whether a write goes on), then the values.
        array: the values, a NumPy array in this memory.
        shared: names only the values, without the header, with their dtype and shape, for a backup server.
        updates: the number of updates that the array has had.
    """

    def __init__(self, name: str, spec: TensorSpec, segments: Segments) -> None:
        self.name = name
        self.spec = spec
        region = segments.make(_HEADER + spec.nbytes)
        self.handle = region.handle
        numbers = region.part(_HEADER, spec.nbytes)
        self.shared = SharedTensor(numbers.handle, spec)
        self.array: Array = spec.array_in(numbers.memory)
        self._words = _words(region.memory)

    @property
    def updates(self) -> int:
        return self._words[_UPDATES]

    @contextlib.contextmanager
    def writing(self, updates: int = 1) -> Iterator[Array]:
        """Surround a change of the array, so that a process that reads it meanwhile notices, and reads it again.

        Args: updates: the number to add to the attribute `updates` if the change succeeds.
        Yields: the array, to be changed in place.
        """
        words = self._words
        words[_TURN] += 1
        before_others_see()
        try:
            yield self.array
            words[_UPDATES] += updates
        finally:
            before_others_see()
            words[_TURN] += 1

    def update(self, method: str, operand: Any) -> None:
        """Update the array by a variable's method such as "assign_add", with an operand that fits."""
        with self.writing() as array:
            update_in_place(method, array, operand)

    def rows(self, indices: Any) -> Array:
        """Return a copy of the rows at `indices`."""
        return self.array[indices]


class MappedTable:
    """A server's `Table`, mapped into another process of the node. It reads the array without asking the server."""

    def __init__(self, spec: TensorSpec, memory: np.ndarray) -> None:
        self._words = _words(memory)
        self._array = spec.array_in(memory[_HEADER:])

    @property
    def updates(self) -> int:
        return self._words[_UPDATES]

    def copy_to(self, out: Array) -> bool:
        """Copy the array to `out`. Returns: False if the server's writes disturbed it.

        That is, if they disturbed three attempts, or one write lasted 20 ms. `out` may then have a mixture of values,
        and the caller asks the server for the array.
        """

        def copy() -> Array:
            out[...] = self._array
            return out

        return self._undisturbed(copy) is not None

    def rows(self, indices: Any) -> Array | None:
        """Return a copy of the rows at `indices`; None if writes disturbed three attempts, or one lasted 20 ms."""
        return self._undisturbed(lambda: self._array[indices])

    def _undisturbed(self, read: Callable[[], T]) -> T | None:
        """Call `read` until no write has disturbed it, and return its result.

        As in Linux's seqlock, the table's counter (of begins and ends of writes) is even and the same before and after
        an undisturbed call. Returns: None if a write lasts more than 20 ms, or writes disturb three calls.
        """
        words = self._words
        for _ in range(_ATTEMPTS):
            end = time.monotonic() + _SECONDS_FOR_AN_UPDATE
            while (turn := words[_TURN]) % 2:
                if time.monotonic() > end:
                    return None
                time.sleep(_PAUSE)
            before_others_see()
            found = read()
            before_others_see()
            if words[_TURN] == turn:
                return found
        return None


def _words(memory: np.ndarray) -> memoryview:
    return memory[:_HEADER].data.cast("q")
