"""Errors that all ranks raise, so that no rank waits for another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

from mpistrat.errors import CollectiveMismatchError, RankLostError, StallError


class RaisingTogether(contextlib.AbstractContextManager[None]):
    """A context around checks of this rank's operands: it passes an error of its block to `raise_together`.

    An error that all ranks raise already, or a KeyboardInterrupt or SystemExit, leaves the block as it is.

    Args: raise_together: raises an error here, and CollectiveMismatchError on the ranks that wait in a collective.
    """

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
    """Whether the other ranks raise `error`, too, or have been told of it, so that this rank need not tell them.

    Returns: True for CollectiveMismatchError, StallError and RankLostError, and after `mark_raised_by_all(error)`.
    """
    known = (CollectiveMismatchError, StallError, RankLostError)
    return isinstance(error, known) or getattr(error, "_mpistrat_raised_by_all", False)


def mark_raised_by_all(error: BaseException) -> None:
    """Note on `error` that all ranks raise it or have been told of it, for `is_raised_by_all`.

    It does nothing if the error's class has `__slots__`.
    """
    with contextlib.suppress(AttributeError):  # it has slots
        error._mpistrat_raised_by_all = True  # type: ignore[attr-defined]
