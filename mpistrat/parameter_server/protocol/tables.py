"""An array as its server keeps it, and as other processes read it while the server may be writing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.node.shared_memory import before_others_see
from mpistrat.parameter_server.protocol.messages import SharedTensor, TensorSpec
from mpistrat.parameter_server.rpc.segments import Segments
from mpistrat.variables.updates import update_in_place

# Before the array: how many times a write has begun or ended, and how many updates there were.
_HEADER = 64
_TURN, _UPDATES = 0, 1
_ATTEMPTS = 3
_SECONDS_FOR_AN_UPDATE = 0.02
_PAUSE = 50e-6

T = TypeVar("T")


class Table:
    """An array on a server.

    Attributes:
        spec: what the array is.
        handle: by which the other processes of the node map it.
        array: in that memory.
        shared: the array alone, for a message to a process that maps it.
        updates: how many the array has had.
    """

    def __init__(self, name: str, spec: TensorSpec, segments: Segments) -> None:
        self.name, self.spec = name, spec
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
        """Surrounds each change of the array: a process that reads meanwhile reads again."""
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
        """Call a variable's method such as "assign_add", with an operand that fits."""
        with self.writing() as array:
            update_in_place(method, array, operand)

    def rows(self, indices: Any) -> Array:
        """A copy."""
        return self.array[indices]


class MappedTable:
    """A server's table, mapped by a process that reads it."""

    def __init__(self, spec: TensorSpec, memory: np.ndarray) -> None:
        self._words = _words(memory)
        self._array = spec.array_in(memory[_HEADER:])

    @property
    def updates(self) -> int:
        return self._words[_UPDATES]

    def copy_to(self, out: Array) -> bool:
        """Fill `out`. Returns: False where the server was writing all the time."""

        def copy() -> Array:
            out[...] = self._array
            return out

        return self._undisturbed(copy) is not None

    def rows(self, indices: Any) -> Array | None:
        """A copy of some rows; None where the server was writing all the time."""
        return self._undisturbed(partial(self._array.__getitem__, indices))

    def _undisturbed(self, read: Callable[[], T]) -> T | None:
        """What `read` returns between two writes. As in Linux's seqlock, the turn is even and stays the same."""
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
