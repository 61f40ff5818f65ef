"""Where the user's program stands."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import traceback
from types import CodeType, FrameType
from typing import NamedTuple

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Where Python and what was installed for it are; "<frozen runpy>" starts modules.
_INSTALLED = (sys.prefix + os.sep, sys.base_prefix + os.sep, "<frozen ")

# Of decorators (the latter two mark what is deprecated), and our entry point for torch, which is not in this package.
_CALL_TORCH = "contextlib", "typing_extensions", "warnings", "mpistrat_torch"

# Whose a frame is. Between the program's and us: of this package, torch, and what calls torch.
_BETWEEN, _OF_LIBRARY, _OF_PROGRAM = range(3)

# A frame in a traceback: its line, and the lines of code below it, which are indented further.
FRAME = re.compile(r'(?m)^( *)File "(.+)", line (\d+), in (.+)\n(?:\1 {2,}.*\n|\1\[Previous.*\n)*')


class SourceLine(NamedTuple):
    """Where a frame stood: it runs on. The names are those of a frame."""

    f_code: CodeType
    f_lineno: int
    f_back: None = None


class _Instead(threading.local):
    """Attributes: place: where calls of this thread, which is one of our own, count as made.

    Calls in frames of the program, such as a callback of a future, count as made there.
    """

    place: SourceLine | None = None


instead = _Instead()


def outside(frame: FrameType | SourceLine) -> FrameType | SourceLine:
    """The innermost frame of the user's program, at or outside `frame`.

    Frames of this package, of torch (`backward` reduces), of torch_xla and of decorators around them are not the
    user's, nor are frames of installed libraries, such as Lightning. Where the user has no frame, it is the innermost
    one of an installed library, and else the outermost frame.
    """
    of_library = None
    while True:
        owner = _owner_of(frame.f_code.co_filename)
        if owner == _OF_PROGRAM:
            return frame
        if owner == _OF_LIBRARY and of_library is None:
            of_library = frame
        if frame.f_back is None:
            return instead.place or of_library or frame
        frame = frame.f_back


def raised_at(error: BaseException, otherwise: str = "") -> str:
    """Where the user's program stood when `error` was raised: "train.py:33 in main".

    Of an error in a DataLoader's worker, whose traceback is in the message, the place there. Where no frame is the
    user's, `otherwise`, or the innermost of an installed library, or "".
    """
    text = "".join(traceback.format_exception_only(error))
    in_worker = [f"{file}:{line} in {name}" for _, file, line, name in FRAME.findall(text)]
    places = {_OF_PROGRAM: "", _OF_LIBRARY: ""}
    for place in places_of(error) + in_worker:
        places[_owner_of(place.partition(":")[0])] = place
    return places[_OF_PROGRAM] or otherwise or places[_OF_LIBRARY]


def message_of(error: BaseException) -> str:
    """Of an error in a DataLoader's worker, the message there."""
    message = "".join(traceback.format_exception_only(error)).partition(": ")[2].strip()
    after_frames = [message[frame.end() :].strip() for frame in FRAME.finditer(message)]
    return "".join(after_frames[-1:]).removeprefix(f"{type(error).__name__}: ") or message


def places_of(error: BaseException) -> list[str]:
    """Where the frames stood that `error` passed, the innermost last. Reads no source file: that may hang."""
    stack = traceback.walk_tb(error.__traceback__)
    return [f"{f.f_code.co_filename}:{line} in {f.f_code.co_name}" for f, line in stack]


@functools.cache  # each collective looks at several frames
def _owner_of(file: str) -> int:
    # A library is loaded by the time that a frame of it is seen.
    folders = [os.path.dirname(library) + os.sep for library in _files_of("torch", "torch_xla")]
    if file in _files_of(*_CALL_TORCH) or file.startswith((PACKAGE, *folders)):
        return _BETWEEN
    installed = file.startswith(_INSTALLED) or f"{os.sep}site-packages{os.sep}" in file
    return _OF_LIBRARY if installed else _OF_PROGRAM


def _files_of(*modules: str) -> list[str]:
    """Of those that are loaded."""
    return list(filter(None, [getattr(sys.modules.get(m), "__file__", None) for m in modules]))


def call_site(frame: FrameType | SourceLine) -> str:
    """Where `outside(frame)` stands: "train.py:33 in main"."""
    frame = outside(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
