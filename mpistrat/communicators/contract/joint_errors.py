"""Errors that all ranks raise, so that no rank waits for another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

from mpistrat.errors import CollectiveMismatchError, RankLostError, StallError


class RaisingTogether(contextlib.AbstractContextManager[None]):
    """A context that passes errors of its block to `raise_together`, unless the other ranks know of them already."""

    __slots__ = ("_raise_together",)

    def __init__(self, raise_together: Callable[[Exception], NoReturn]) -> None:
        self._raise_together = raise_together

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not is_raised_by_all(error):
            try:
                self._raise_together(error)
            finally:
                del error


def is_raised_by_all(error: BaseException) -> bool:
    """Whether the other ranks know of `error` already, because a collective has raised it on all of them.

    True for CollectiveMismatchError, StallError and RankLostError, and for errors from `mark_raised_by_all`.
    """
    known = (CollectiveMismatchError, StallError, RankLostError)
    return isinstance(error, known) or getattr(error, "_mpistrat_raised_by_all", False)


def mark_raised_by_all(error: BaseException) -> None:
    """Note on `error` that all ranks raise it or have been told; an exception class with slots takes no note."""
    with contextlib.suppress(AttributeError):  # it has slots
        error._mpistrat_raised_by_all = True  # type: ignore[attr-defined]
