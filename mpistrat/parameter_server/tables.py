"""One array as a server keeps it, and as others read it while the server may be writing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.arrays import Array
from mpistrat.communicators.node.shared_memory import before_others_see
from mpistrat.parameter_server.rpc.segments import Region, RegionHandle, Segments
from mpistrat.parameter_server.tensors import TensorSpec
from mpistrat.variables.updates import update_in_place

# Before the array: how often it was begun or ended to be written, and how many updates it has had.
_HEADER = 64
_TURN, _UPDATES = 0, 1
_LOOKS = 3
_SECONDS_FOR_AN_UPDATE = 0.02
_PAUSE = 50e-6


class Table:
    """An array on a server.

    Attributes:
        array: in memory that others of the node map.
        spec: what it is.
        updates: how many it has had.
    """

    def __init__(self, name: str, spec: TensorSpec, segments: Segments) -> None:
        self.name, self.spec = name, spec
        self._region: Region = segments.make(_HEADER + spec.nbytes)
        self._words = _words(self._region.memory)
        self.array: Array = spec.array_in(self._region.memory[_HEADER:])

    @property
    def handle(self) -> RegionHandle:
        return self._region.handle

    @property
    def array_handle(self) -> RegionHandle:
        return self.handle._replace(first=self.handle.first + _HEADER, nbytes=self.spec.nbytes)

    @property
    def updates(self) -> int:
        return self._words[_UPDATES]

    @contextlib.contextmanager
    def writing(self, updates: int = 1) -> Iterator[Array]:
        """Around what changes the array: who reads meanwhile reads again."""
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
        """`method` of a variable, with an operand that fits."""
        with self.writing() as array:
            update_in_place(method, array, operand)

    def rows(self, indices: Any) -> Array:
        return _rows(self.array, indices)


class MappedTable:
    """A server's table, in the memory of a process that reads it there."""

    def __init__(self, spec: TensorSpec, memory: np.ndarray) -> None:
        self._words = _words(memory)
        self._array = spec.array_in(memory[_HEADER:])

    @property
    def updates(self) -> int:
        return self._words[_UPDATES]

    def copy_to(self, out: Array) -> bool:
        """Fill `out`; returns False where the server wrote all the time."""

        def copy() -> None:
            out[...] = self._array

        return self._undisturbed(copy)

    def rows(self, indices: Any) -> Array | None:
        """A copy of some rows; None where the server wrote all the time."""
        found: list[Array] = []

        def copy() -> None:
            found[:] = [_rows(self._array, indices)]

        return found[0] if self._undisturbed(copy) else None

    def _undisturbed(self, copy: Any) -> bool:
        """As in Linux's seqlock: what was read while the turn stayed the same, and even, is whole."""
        words = self._words
        for _ in range(_LOOKS):
            end = time.monotonic() + _SECONDS_FOR_AN_UPDATE
            while (turn := words[_TURN]) % 2:
                if time.monotonic() > end:
                    return False
                time.sleep(_PAUSE)
            before_others_see()
            copy()
            before_others_see()
            if words[_TURN] == turn:
                return True
        return False


def _words(memory: np.ndarray) -> memoryview:
    return memory[:_HEADER].data.cast("q")


def _rows(array: Array, indices: Any) -> Array:
    """A copy."""
    if arrays.is_torch(array):
        import torch

        return array[torch.as_tensor(indices)]
    return array[indices]
