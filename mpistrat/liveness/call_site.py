"""Where the user's program stands."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_between: dict[str, bool] = {}  # by file name


class _StandingFor(threading.local):
    frame: FrameType | None = None


_standing_for = _StandingFor()


@contextlib.contextmanager
def standing_for(frame: FrameType) -> Iterator[None]:
    """What this thread calls in the block, a thread of our own, counts as called at `frame`."""
    _standing_for.frame = frame
    try:
        yield
    finally:
        _standing_for.frame = None


def outside(frame: FrameType) -> FrameType:
    """The innermost frame of the user's, counted from `frame`; the outermost if there is none.

    Not this package's, nor those of what may stand between: torch, whose `backward` reduces, torch_xla, and contextlib.
    """
    frame = _standing_for.frame or frame
    while True:
        file = frame.f_code.co_filename
        between = _between.get(file)
        if between is None:
            between = _between[file] = _is_between(file)
        if not between or frame.f_back is None:
            return frame
        frame = frame.f_back


def raised_at(error: BaseException) -> str:
    """Where the user's program stood when `error` was raised: "train.py:33 in main"; "" if it had no part in it."""
    stack = traceback.extract_tb(error.__traceback__)
    at = next((place for place in reversed(stack) if not _is_between(place.filename)), None)
    return f"{at.filename}:{at.lineno} in {at.name}" if at else ""


@functools.cache  # of each frame of each collective; a library has been loaded when a frame of it is seen
def _is_between(file: str) -> bool:
    libraries = [
        getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "torch_xla")
    ]
    folders = [os.path.dirname(library) + os.sep for library in libraries if library is not None]
    return file == contextlib.__file__ or file.startswith((_PACKAGE, *folders))


def call_site(frame: FrameType) -> str:
    """Where `outside(frame)` stands: "train.py:33 in main"."""
    frame = outside(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
