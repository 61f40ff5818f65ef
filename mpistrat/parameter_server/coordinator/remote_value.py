"""`RemoteValue`: the future result of a scheduled function."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from mpistrat import arrays, nest
from mpistrat.input.element_spec import ArraySpec
from mpistrat.values import ReadsAsArray
from mpistrat.variables.variable import Variable


class RemoteValue(ReadsAsArray):
    """The future result of a scheduled function.

    Made by: `ClusterCoordinator.schedule`.
    Args:
        changed: the condition that is notified when the result has arrived.
        unpack: unpickles the result.
        name: the function's name.
    Attributes:
        worker: the index of the worker that got the function last; None before a worker gets it.

    Example, on several ranks::

        def first_rows(n):
            return torch.ones(4, 2)[:n]
        value = coordinator.schedule(first_rows, args=(2,))
        value.get()    # waits; a tensor of shape [2, 2]
        value.fetch()  # the same as a NumPy array
    """

    def __init__(
        self, changed: threading.Condition, unpack: Callable[[bytes], Any], name: str = "a function"
    ) -> None:
        self._changed = changed
        self._unpack = unpack
        self._name = name
        self.worker: int | None = None
        self._finished = False
        self._packed: bytes | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def get(self) -> Any:
        """Wait for the function to end, and return its result.

        Raises: the function's error, on each call; CancelledError if another function's error has cancelled it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished)
            packed = self._packed
        if self._error is not None:
            raise self._error.with_traceback(None)
        if packed is not None:
            value = self._unpack(packed)  # outside the lock, because a large result takes long
            with self._changed:
                if self._packed is not None:
                    self._value = value
                    self._packed = None
        return self._value

    def fetch(self) -> Any:
        """Wait for the function to end, and return its result with NumPy arrays in place of tensors and variables.

        The structure and all other leaves, such as strings and numbers, are those of the result, unchanged.

        Raises: the function's error, on each call; CancelledError if another function's error has cancelled it.
        """
        return nest.map_structure(_fetched, self.get())

    def _read(self) -> NoReturn:
        raise ValueError(f"{self!r} is not an array: take the result of its get() or fetch()")

    def put(self, packed: bytes | None, error: BaseException | None = None) -> None:
        """Set the function's pickled result, or its error.

        Called by: the coordinator's queue, while it holds `changed`; it notifies `changed` afterwards.

        Example:
            >>> from threading import Condition
            >>> value = ms.coordinator.RemoteValue(Condition(), bytes.decode, name="step")
            >>> value.put(None, ms.errors.CancelledError("another function failed"))
            >>> value
            <RemoteValue of step: CancelledError: another function failed>
        """
        self._packed = packed
        self._error = error
        self._finished = True

    def __repr__(self) -> str:
        """Describe the state of the result, without waiting for it or unpickling it."""
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
    if arrays.is_array(leaf):
        return ArraySpec.of(leaf)
    return leaf


def _fetched(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        return leaf.numpy()
    if arrays.is_array(leaf):
        return arrays.to_numpy(leaf)
    return leaf
