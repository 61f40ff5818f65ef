"""What a scheduled function will have returned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from mpistrat import arrays, nest
from mpistrat.input.element_spec import ArraySpec
from mpistrat.values import ReadsAsArray
from mpistrat.variables.variable import Variable


class RemoteValue(ReadsAsArray):
    """The result of a scheduled function; made by `ClusterCoordinator.schedule`.

    Args:
        changed: notified when it is there.
        unpack: makes the value of the bytes that came.
        name: the function's.
    Attributes:
        worker: the number of the worker that got the function last; None before.
    """

    def __init__(
        self, changed: threading.Condition, unpack: Callable[[bytes], Any], name: str = "a function"
    ) -> None:
        self._changed, self._unpack, self._name = changed, unpack, name
        self.worker: int | None = None
        self._finished = False
        self._packed: bytes | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def get(self) -> Any:
        """What the function returned; waits for it.

        Raises: what the function raised, each time it is called; CancelledError where the closure was cancelled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished)
            packed = self._packed
        if self._error is not None:
            raise self._error.with_traceback(None)
        if packed is not None:
            value = self._unpack(packed)  # not in the lock, for it may be large
            with self._changed:
                if self._packed is not None:
                    self._value, self._packed = value, None
        return self._value

    def fetch(self) -> Any:
        """`get`, with NumPy arrays in place of tensors and variables."""
        return nest.map_structure(_fetched, self.get())

    def _read(self) -> NoReturn:
        raise ValueError(f"{self!r} is not an array: take what its get() or fetch() returns")

    def put(self, packed: bytes | None, error: BaseException | None = None) -> None:
        """Called by: the queue, which holds `changed`, and notifies."""
        self._packed, self._error = packed, error
        self._finished = True

    def __repr__(self) -> str:
        """Does not wait, and fetches nothing."""
        if not self._finished:
            state = "waiting" if self.worker is None else f"with worker {self.worker}"
        elif self._error is not None:
            state = f"{type(self._error).__name__}: {self._error!s:.60}"
        elif self._packed is not None:
            state = f"ready, by worker {self.worker}"
        else:
            state = f"{nest.map_structure(_outline, self._value)!r:.80}, by worker {self.worker}"
        return f"<RemoteValue of {self._name}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RemoteValue cannot be sent to a worker: fetch() it, and pass the value")


def _outline(leaf: Any) -> Any:
    return ArraySpec.of(leaf) if arrays.is_array(leaf) else leaf


def _fetched(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        return leaf.numpy()
    return arrays.to_numpy(leaf) if arrays.is_array(leaf) else leaf
