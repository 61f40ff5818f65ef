"""Finds the line of the user's program that a message names: where it calls this package, or where an error arose."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import traceback
from types import CodeType, FrameType
from typing import Any, NamedTuple

_ROOM = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(_ROOM) + os.sep
# The folders of Python and of installed packages; "<frozen runpy>" starts modules.
_INSTALLED = (sys.prefix + os.sep, sys.base_prefix + os.sep, "<frozen ")

# Modules with functions that stand between the program and us on the stack: modules of decorators (`typing_extensions`
# and `warnings` mark deprecated functions), and our entry point for torch, outside this package.
_CALL_TORCH = "contextlib", "typing_extensions", "warnings", "mpistrat_torch"

# The owner of a frame. _BETWEEN: this package, torch, torch_xla or one of _CALL_TORCH.
_BETWEEN, _OF_LIBRARY, _OF_PROGRAM = range(3)

# A frame in a traceback: its `File` line and the lines of code below it, indented further.
FRAME = re.compile(r'(?m)^( *)File "(.+)", line (\d+), in (.+)\n(?:\1 {2,}.*\n|\1\[Previous.*\n)*')

# The end of a traceback of an assert statement without a message: the lines after the last `File` line. The first of
# these lines may hold more, as in `if x: assert y`. Python may mark parts of the lines.
_BARE_ASSERT = re.compile(
    r'\n +(?!File "|.*\braise\b)(\w.*)\n(?:(?! +File ") .*\n)*AssertionError\s*\Z'
)


class SourceLine(NamedTuple):
    """A copy of a frame's code and line number, taken before the frame runs on.

    The fields are named like the attributes of a frame, so that `outside` takes either. `f_back` (the caller's frame)
    is always None.
    """

    f_code: CodeType
    f_lineno: int
    f_back: None = None


class _Instead(threading.local):
    """The line of the program that messages name for work that one of our threads does. Each thread has its own value.

    Attributes: place: the line of the program that submitted the work; None if the thread does no submitted work. It
        is not used while a function of the program runs in the thread, such as a callback of a future.
    """

    place: SourceLine | None = None


instead = _Instead()


def outside(frame: FrameType | SourceLine) -> FrameType | SourceLine:
    """Return the innermost frame of the user's program among `frame` and its callers.

    Frames of this package, of torch (`backward` calls our reductions), of torch_xla, of decorators around them, and of
    installed libraries, such as Lightning, are not the user's.

    Returns: if no frame is the user's: `instead.place`; if that is None, the innermost frame of an installed library;
        without one, the outermost frame.
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
    """Return the line of the user's program at which `error` was raised: "train.py:33 in main".

    It is the innermost such line. For an error in a DataLoader's worker process, it is the line in the worker, read
    from the traceback in the error's message.

    Returns: if no frame is the user's, the error's attribute `called_at`, which a thread of ours gives it; without one
        `otherwise`; if that is "", the innermost frame of an installed library; "" without one.
    """
    otherwise = getattr(error, "called_at", otherwise)
    text = "".join(traceback.format_exception_only(error))
    places = places_of(error)
    for _, file, line, name in FRAME.findall(text):  # in a worker process
        places.append(f"{file}:{line} in {name}")
    innermost = {_OF_PROGRAM: "", _OF_LIBRARY: ""}
    for place in places:
        file, _, _ = place.partition(":")
        innermost[_owner_of(file)] = place
    return innermost[_OF_PROGRAM] or otherwise or innermost[_OF_LIBRARY]


def message_of(error: BaseException) -> str:
    """Return the message of `error`, without the name of its class.

    A DataLoader's error from a worker process holds the worker's traceback: only the message at its end is returned.
    An assert statement without a message gives "AssertionError: " and the text of its line.
    """
    text = "".join(traceback.format_exception_only(error))
    message = text.partition(": ")[2].strip()
    frames = FRAME.finditer(message)
    after_frames = [message[frame.end() :].strip() for frame in frames]
    in_worker = "".join(after_frames[-1:])
    message = in_worker.removeprefix(f"{type(error).__name__}: ") or message
    if isinstance(error, AssertionError):
        bare = _BARE_ASSERT.search("".join(traceback.format_exception(error)))
        if bare is not None:
            return f"AssertionError: {bare[1]}"
    return message


def places_of(error: BaseException) -> list[str]:
    """Return a text for each frame of the traceback of `error`, "train.py:33 in main", the innermost frame last.

    It reads no source files, because a file system may hang. [] if the error was never raised.
    """
    places = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        places.append(f"{code.co_filename}:{line} in {code.co_name}")
    return places


@functools.cache  # each collective looks at several frames
def _owner_of(file: str) -> int:
    # The result may be cached: when a frame of a library is seen, the library has been loaded.
    libraries = _files_of("torch", "torch_xla")
    folders = [os.path.dirname(library) + os.sep for library in libraries]
    in_folder = file.startswith((PACKAGE, *folders))
    if in_folder or file in _files_of(*_CALL_TORCH):
        return _BETWEEN
    of_packages = f"{os.sep}site-packages{os.sep}"
    installed = file.startswith(_INSTALLED) or of_packages in file
    return _OF_LIBRARY if installed else _OF_PROGRAM


def _files_of(*modules: str) -> set[str]:
    """Return the files of the given modules; modules that are not loaded are left out."""
    loaded = [sys.modules.get(name) for name in modules]
    files: set[Any] = {getattr(module, "__file__", None) for module in loaded}
    return files - {None}


def call_site(frame: FrameType | SourceLine) -> str:
    """Return the line that runs in the user's innermost frame among `frame` and its callers: "train.py:33 in main"."""
    frame = outside(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
