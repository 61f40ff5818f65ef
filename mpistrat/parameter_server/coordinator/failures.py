"""Errors of closures: the worker packs them, and the chief raises them."""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from mpistrat.errors import OutOfRangeError
from mpistrat.parameter_server.coordinator.pickling import dumps, loads


class SentError(NamedTuple):
    """The error of a closure (a scheduled function) in a message from its worker to the chief.

    Attributes:
        packed: the pickled exception; b"" if it cannot be pickled.
        text: the exception's class name and text.
        stack: the worker's traceback, as text.
    """

    packed: bytes
    text: str
    stack: str


class WorkerTraceback(Exception):
    """The `__cause__` of a closure's error on the chief: its text is the worker's name and traceback."""


def pack_error(error: BaseException, reference_of: Callable[[Any], Any | None]) -> SentError:
    """Pack a closure's error for the chief. Called by: the worker's function that has caught the error.

    Errors that would end the chief, such as SystemExit, become RuntimeErrors; StopIteration becomes OutOfRangeError.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without the frame of the caller
    stack = "".join(traceback.format_exception(error)).rstrip()
    raised = _as_error(error)
    packed = b""
    with contextlib.suppress(Exception):
        packed = dumps(raised, reference_of, _without_init)
    return SentError(packed, _text(raised), stack)


def unpack_error(failure: SentError, worker: str, resolve: Callable[[Any], Any]) -> BaseException:
    """Return the error for the chief to raise: of its own class if it can be unpickled, else a RuntimeError.

    Args: worker: the worker's name, for the traceback in the error's `__cause__`.
    """
    error = None
    with contextlib.suppress(Exception):
        error = loads(failure.packed, resolve)
    if not isinstance(error, Exception):
        error = RuntimeError(failure.text)
    error.__cause__ = WorkerTraceback(f"on {worker}:\n{failure.stack}")
    return error


def _without_init(value: Any) -> tuple[Any, ...] | None:
    """Return a reduction, as `__reduce__` does, of an exception with an `__init__` in Python; None for other values.

    Unpickling it calls only the built-in base class's `__init__`. Python's own reduction would call the class's
    `__init__` with the arguments of the base class, and often fails. Also None for a class with its own `__reduce__`.
    """
    kind = type(value)
    methods = ("__init__", "__new__", "__reduce__", "__reduce_ex__")
    of_python = [method for method in methods if _is_of_python(kind, method)]
    if not isinstance(value, BaseException) or of_python != ["__init__"]:
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
    """Return `error`, or its replacement if the chief could not raise it without ending itself or a loop of its own.

    StopIteration becomes OutOfRangeError. SystemExit and others that are no Exception become RuntimeError.
    """
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
