"""Errors of one process, as other processes raise them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

from mpistrat import errors

_KNOWN_EVERYWHERE: tuple[type[Exception], ...] = (
    errors.InvalidArgumentError,
    errors.NotFoundError,
    errors.FailedPreconditionError,
    errors.UnavailableError,
    ValueError,
    IndexError,
    TypeError,
)


def outcome_of(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the error that it raises."""
    try:
        return work()
    except Exception as error:
        return error


def portable_error(error: Exception) -> Exception:
    """A server's error, for the rank that sent the request.

    Returns: an error of the same class, or of a base class that all ranks have; otherwise a RuntimeError with the
        server's traceback.
    """
    for known in _KNOWN_EVERYWHERE:
        if isinstance(error, known):
            return known(str(error))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return RuntimeError(f"the server failed:\n{trace}")


def attributed_error(error: BaseException, who: str) -> Exception:
    """A rank's error, for the ranks that wait for what it did not manage.

    Args: who: the rank and what it failed at, such as "worker 0 (rank 0) has not restored".
    Returns: an error of the same class, if that is built in or `mpistrat`'s and takes a text; otherwise a RuntimeError.
    """
    text = f"{who}: {type(error).__name__}: {error}"
    if isinstance(error, Exception) and type(error).__module__ in ("builtins", errors.__name__):
        with contextlib.suppress(TypeError):  # some take more than a text
            return type(error)(text)
    return RuntimeError(text)
