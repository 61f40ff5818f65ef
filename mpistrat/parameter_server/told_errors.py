"""Errors of one rank, as others raise them that wait for what it did not manage."""

from __future__ import annotations

import contextlib

from mpistrat import errors


def as_told(error: BaseException, who: str) -> Exception:
    """An error for other ranks: of the same class, if each process has that and a text makes one; else a RuntimeError.

    Args: who: failed at what, such as "worker 0 (rank 0) has not restored".
    """
    text = f"{who}: {type(error).__name__}: {error}"
    if isinstance(error, Exception) and type(error).__module__ in ("builtins", errors.__name__):
        with contextlib.suppress(TypeError):  # some take more than a text
            return type(error)(text)
    return RuntimeError(text)
