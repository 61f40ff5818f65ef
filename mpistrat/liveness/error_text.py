"""The text of an error that ends a job: a traceback of the user's lines, and advice in the last line."""

from __future__ import annotations

import re
import textwrap
import traceback

from mpistrat import errors
from mpistrat.liveness.call_site import FRAME, PACKAGE, message_of, places_of, raised_at
from mpistrat.settings import full_tracebacks

# Frames between lines of the program: of this package, and of calls that torch passes on.
_LEFT_OUT = re.compile(
    rf"{re.escape(PACKAGE)}|.*/(mpistrat_torch\.py|contextlib\.py|multiprocessing/|torch/"
    r"(_utils\.py|_tensor\.py|utils/|autograd/|distributed/|nn/parallel/|nn/modules/(module|container)\.py))"
)
# The traceback of this rank's error, and the traceback of the CollectiveMismatchError that all ranks raise because of
# that error. Only the second has the frames of the callers.
_BY_CAUSE = re.compile(
    r"(?s)(Traceback \(most recent call last\):\n)(.*)\n+The above exception was the direct cause [^\n]*\n\n"
    r"\1(.*?)mpistrat\.errors\.CollectiveMismatchError: .*"
)
_MOST_LETTERS = 400  # in the last line
_BETWEEN_SENTENCES = re.compile(r"(?<=[.)?]) (?=[A-Z])")


def of_the_program(text: str) -> str:
    """Return the traceback `text` without the frames of this package, and of torch's own calls of functions.

    If an error of this rank has caused a CollectiveMismatchError, only this rank's error is kept.

    Returns: the whole `text` if MPISTRAT_TRACEBACK=full, or if no frame would be left.
    """
    text = re.sub(r"(?m)^\[rank\d+\]: ?", "", text)  # torch's prefix of each line
    short = FRAME.sub(lambda frame: "" if _LEFT_OUT.match(frame[2]) else frame[0], text)
    if full_tracebacks() or not FRAME.search(short):
        return text
    # The message of an error in a worker process has the worker's traceback.
    short = short.replace("Original Traceback (most recent call last):\n", "")
    return _BY_CAUSE.sub(r"\1\3\2", short).rstrip("\n")


def advice_for(error: BaseException, rank: int) -> str:
    """Return the last line of the report about `error`: "mpistrat: correct train.py:33 in main (rank 3): …".

    The line names a line of the user's program, and has the first line of the message of `error`; after a colon the
    second line, too. If this package raised `error`, it has the first paragraph of the message (the cause), and the
    last sentence (the advice) if there is room. If another rank has raised the error, the place, the rank and the text
    are taken from its attribute `raised_by_rank`. An error of `mpistrat.errors` has a heading in
    docs/troubleshooting.md, and the line ends with it.
    """
    advice = getattr(error, "raised_by_rank", "")
    heading = ""
    if not advice:
        headings = [
            f" (docs/troubleshooting.md: {kind.__name__})"
            for kind in type(error).__mro__
            if kind.__module__ == errors.__name__
        ]
        heading = "".join(headings[:1])
        text = message_of(error) or type(error).__name__
        innermost = ["", *places_of(error)][-1]
        if innermost.startswith(PACKAGE):
            text = _cause_and_advice(text)
        elif isinstance(error, KeyError):
            text = f"KeyError: {text}"  # the message is the key alone
        advice = f"{raised_at(error, 'the error above')} (rank {rank}): {text}"
    first = re.match(r".*((?<=:)\n.*)?", advice)[0]  # type: ignore[index]
    short = textwrap.shorten(first, _MOST_LETTERS, placeholder=" …").rstrip(".")
    return f"mpistrat: correct {short}{heading}.\n"


def _cause_and_advice(message: str) -> str:
    """Return the first paragraph of `message`, and the last sentence of its last paragraph, in one line.

    Args: message: a message of this package. A later paragraph begins with a capital letter, and the last sentence says
        what to do.
    """
    paragraphs = re.split(r"\n(?=[A-Z])", message)
    cause = " ".join(paragraphs[0].split())
    if len(paragraphs) == 1:
        return cause
    last = " ".join(paragraphs[-1].split())
    advice = _BETWEEN_SENTENCES.split(last)[-1]
    return f"{cause} … {advice}"


def told_of(error: BaseException, rank: int) -> str:
    """Return the traceback of `error` by `of_the_program`, followed by `advice_for`."""
    text = of_the_program("".join(traceback.format_exception(error)))
    return f"{text}\n{advice_for(error, rank)}".rstrip()
