"""Errors of closures, as the worker sends them and the chief raises them."""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpistrat.errors import OutOfRangeError
from mpistrat.parameter_server.coordinator.pickling import dumps, loads


class SentError(NamedTuple):
    """An error, as it is sent.

    Attributes:
        packed: the exception; b"" where it cannot be pickled.
        text: its class and what it says.
        stack: the worker's traceback.
    """

    packed: bytes
    text: str
    stack: str


class WorkerTraceback(Exception):
    """The cause of an error that a closure raised: where, on the worker."""


def pack_error(error: BaseException, reference_of: Callable[[Any], Any | None]) -> SentError:
    """Called by: the worker, in the function that caught it."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the frame that caught it
    stack = "".join(traceback.format_exception(error)).rstrip()
    raised = _as_error(error)
    packed = b""
    with contextlib.suppress(Exception):
        packed = dumps(raised, reference_of, _without_init)
    return SentError(packed, _text(raised), stack)


def unpack_error(failure: SentError, worker: str, resolve: Callable[[Any], Any]) -> BaseException:
    """The error, of its class where the chief can make one; a RuntimeError with its text otherwise."""
    error = None
    with contextlib.suppress(Exception):
        error = loads(failure.packed, resolve)
    if not isinstance(error, Exception):
        error = RuntimeError(failure.text)
    error.__cause__ = WorkerTraceback(f"on {worker}:\n{failure.stack}")
    return error


def _without_init(value: Any) -> tuple[Any, ...] | None:
    """How an exception of a user's class is copied. Python's way calls its `__init__` with the base's arguments."""
    kind = type(value)
    if not isinstance(value, BaseException) or not _is_of_python(kind, "__init__"):
        return None
    if {*map(partial(_is_of_python, kind), ("__new__", "__reduce__", "__reduce_ex__"))} != {False}:
        return None
    reduced: Any = value.__reduce__()
    _, args, *state = reduced
    return _made_of, (kind, args), *state


def _made_of(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    base: Any = next(cls for cls in kind.__mro__ if not _is_of_python(cls, "__init__"))
    base.__init__(error, *args)
    return error


def _is_of_python(kind: type, method: str) -> bool:
    return isinstance(getattr(kind, method), types.FunctionType)


def _as_error(error: BaseException) -> Exception:
    """What the chief is to raise: nothing that would end it, or a loop of its own, in silence."""
    if isinstance(error, StopIteration):
        return OutOfRangeError(
            "a scheduled function ended with StopIteration: an iterator that it called next() on has no more elements"
        )
    if isinstance(error, Exception):
        return error
    return RuntimeError(
        f"a scheduled function raised {_text(error)}; it cannot end its worker: the job ends when the chief does"
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
