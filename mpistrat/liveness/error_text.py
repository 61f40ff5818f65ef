"""How an error that ends a job is told: in the lines of the program, and with advice at the end."""

from __future__ import annotations

import os
import re
import traceback
from types import TracebackType

from mpistrat.errors import CollectiveMismatchError, TopologyError
from mpistrat.liveness.call_site import (
    OF_PROGRAM,
    PACKAGE,
    files_of,
    owner_of,
    places_of,
    raised_at,
)
from mpistrat.settings import full_tracebacks

# A frame in a traceback: its line, and the lines of code below it, which are indented further.
_FRAME = re.compile(
    r'^( *)File "(.+)", line (\d+)(?:, in (.+))?\n(?:\1 {2,}.*\n|\1\[Previous line .*\n)*',
    re.MULTILINE,
)
_LOADERS_OF_TORCH = ("_utils.py", os.path.join("utils", "data", ""))
_SENTENCE = re.compile(r"(?<=[.)]) (?=[A-Z])")
_MOST_CHARACTERS = 300  # of an advice


def blamed(error: BaseException) -> BaseException:
    """The error that is to be shown: of a mismatch that an error of this rank has caused, that error.

    Its traceback then begins where the program begins.
    """
    cause = error.__cause__
    if not isinstance(error, CollectiveMismatchError) or cause is None:
        return error
    callers, trace = [], error.__traceback__
    while trace is not None:
        callers.append(trace)
        trace = trace.tb_next
    trace = cause.__traceback__
    for caller in reversed(callers):
        trace = TracebackType(trace, caller.tb_frame, caller.tb_lasti, caller.tb_lineno)
    return cause.with_traceback(trace)


def told_of(error: BaseException, rank: int) -> tuple[str, str]:
    """The traceback of `error`, an error of this rank, and what to do about it."""
    return of_the_program("".join(traceback.format_exception(error))), advice_for(error, rank)


def of_the_program(text: str) -> str:
    """A traceback without the frames of this package and of torch's data loaders, unless no other would be left."""
    text = text.rstrip("\n") + "\n"
    short = _FRAME.sub(lambda frame: "" if _is_left_out(frame[2]) else frame[0], text)
    if _shows_all() or not _FRAME.search(short):
        return text
    # The message of an error in a worker has its traceback there.
    return short.replace("Original Traceback (most recent call last):\n", "")


def advice_for(error: BaseException, rank: int) -> str:
    """What to do about `error` of this rank, in a line that names the program's own; "" if the user has interrupted."""
    if isinstance(error, KeyboardInterrupt):
        return ""
    place, text = _place_of(error) or "the error above", own_text(error)
    if any(at.startswith(PACKAGE) for at in places_of(error)[-1:]):
        text = _SENTENCE.split(text.splitlines()[-1])[-1]  # our messages end with what to do
    return f"correct {place} (rank {rank}): {text.splitlines()[0]:.{_MOST_CHARACTERS}}"


def own_text(error: BaseException) -> str:
    """The class and the message, as a traceback ends; of an error in a DataLoader's worker, those of the worker."""
    message, name = str(error), type(error).__name__
    after_frames = [message[frame.end() :].strip() for frame in _FRAME.finditer(message)]
    return "".join(after_frames[-1:]) or (f"{name}: {message}" if message else name)


def _place_of(error: BaseException) -> str:
    """As `raised_at`; of an error in a DataLoader's worker, whose traceback is in the message, the place there."""
    in_worker = [
        f"{file}:{line} in {function}"
        for _, file, line, function in _FRAME.findall(str(error))
        if owner_of(file) == OF_PROGRAM
    ]
    return in_worker[-1] if in_worker else raised_at(error)


def _is_left_out(file: str) -> bool:
    folders = [os.path.dirname(library) for library in files_of("torch")]
    loaders = [os.path.join(folder, part) for folder in folders for part in _LOADERS_OF_TORCH]
    return file in files_of("contextlib") or file.startswith((PACKAGE, *loaders))


def _shows_all() -> bool:
    try:
        return full_tracebacks()
    except TopologyError:  # which would hide the error
        return True
