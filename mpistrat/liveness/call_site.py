"""Where the user's program stands."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_OF_DECORATORS = (
    "contextlib",
    "typing_extensions",
    "warnings",
)  # the latter two mark what is deprecated

_between: dict[str, bool] = {}  # by file name; each collective looks at several frames


class _StandingFor(threading.local):
    frame: FrameType | None = None


_standing_for = _StandingFor()


@contextlib.contextmanager
def standing_for(frame: FrameType) -> Iterator[None]:
    """In the block, calls of this thread, which is one of our own, count as made at `frame`."""
    _standing_for.frame = frame
    try:
        yield
    finally:
        _standing_for.frame = None


def outside(frame: FrameType) -> FrameType:
    """The innermost frame of the user's program, at or outside `frame`; the outermost frame if there is none.

    Frames of this package, torch (whose `backward` reduces), torch_xla, and of those by whose decorators torch is
    called, are not the user's.
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
    """Where the user's program stood when `error` was raised: "train.py:33 in main"; "" if no frame is the user's."""
    own = [place for place in places_of(error) if not _is_between(place.partition(":")[0])]
    return own[-1] if own else ""


def places_of(error: BaseException) -> list[str]:
    """Where the frames stood that `error` passed, the innermost last. Reads no source file: that may hang."""
    stack = traceback.walk_tb(error.__traceback__)
    return [f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}" for f, line in stack]


def _is_between(file: str) -> bool:
    # A library is loaded by the time that a frame of it is seen.
    folders = [os.path.dirname(library) + os.sep for library in _files_of("torch", "torch_xla")]
    return file in _files_of(*_OF_DECORATORS) or file.startswith((_PACKAGE, *folders))


def _files_of(*modules: str) -> list[str]:
    """Of those that are loaded."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    return [file for file in files if file is not None]


def call_site(frame: FrameType) -> str:
    """Where `outside(frame)` stands: "train.py:33 in main"."""
    frame = outside(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
