"""Errors of one process, as others raise them: those of classes that only it has come as others."""

from __future__ import annotations

import contextlib
import traceback

from mpistrat import errors

_REFUSALS: tuple[type[Exception], ...] = (
    errors.InvalidArgumentError,
    errors.NotFoundError,
    errors.FailedPreconditionError,
    errors.UnavailableError,
    ValueError,
    IndexError,
    TypeError,
)


def portable_error(error: Exception) -> Exception:
    """Of a server, for who asked it: what was wrong with the request, as the same error; else all that is known."""
    for kind in _REFUSALS:
        if isinstance(error, kind):
            return kind(str(error))
    told = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return RuntimeError(f"the server failed:\n{told}")


def attributed_error(error: BaseException, who: str) -> Exception:
    """Of a rank, for those that wait for what it did not manage: of the same class, if a text makes one of it.

    Args: who: failed at what, such as "worker 0 (rank 0) has not restored".
    """
    text = f"{who}: {type(error).__name__}: {error}"
    if isinstance(error, Exception) and type(error).__module__ in ("builtins", errors.__name__):
        with contextlib.suppress(TypeError):  # some take more than a text
            return type(error)(text)
    return RuntimeError(text)
