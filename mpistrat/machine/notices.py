"""Shows mpistrat's texts to people. Texts of several ranks do not mix, because each is written at once.

Notices go to the logger `mpistrat`. If neither that logger nor the root logger has a handler, they go to `sys.stderr`,
or to descriptor 2 if that stream cannot be used. Texts of a process that is about to end, and the observer's reports,
never go through `logging`, because another thread may hold its locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import stat
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import logging

_MILLISECONDS_FOR_A_READER = 1000  # how long to wait for the reader of a full pipe
_without_effect: set[str] = set()  # the options that were warned of


def tell(text: str, level: Literal["INFO", "WARNING", "ERROR"] = "WARNING") -> None:
    """Log `text`. If the program has configured no handler, write it to stderr as a line "mpistrat: …" instead.

    Args: level: "INFO" if nothing is wrong. Without a handler, INFO is written to stderr, too, unless the program has
        set a higher level.
    """
    import logging  # imported here, so that `import mpistrat` stays fast

    logger = logging.getLogger("mpistrat")
    number = getattr(logging, level)
    if _is_configured(logger):  # asked each time, because the program may add a handler at any time
        logger.log(number, text, stacklevel=2)
    elif number >= max(logger.level, logger.manager.disable + 1):
        say(f"mpistrat: {text}\n")


def _is_configured(logger: logging.Logger) -> bool:
    """Return whether the logger or a logger above it has a handler that somebody configured.

    A handler that `logging.warning()` made by itself does not count, because any library may call that function.
    """
    import logging

    root = logger.root
    is_as_made = len(root.handlers) == 1 and root.level == logging.WARNING
    if logger.handlers or not is_as_made:
        return logger.hasHandlers()
    (handler,) = root.handlers
    made = getattr(handler.formatter, "_fmt", "") == logging.BASIC_FORMAT
    return not (made and type(handler) is logging.StreamHandler)


def warn_of_no_effect(what: str, why: str, rank: int = 0) -> None:
    """Warn (UserWarning) that the option `what` of tf.distribute does nothing here: once for each option, on rank 0.

    Args: rank: this rank; on any other than 0 nothing happens.
    """
    if rank == 0 and what not in _without_effect:
        _without_effect.add(what)
        warnings.warn(f"{what} does nothing here: {why}", UserWarning, stacklevel=3)


def warn_on_first_rank(
    rank: int, text: str, category: type[Warning] = RuntimeWarning, stacklevel: int = 2
) -> None:
    if rank == 0:
        warnings.warn(text, category, stacklevel + 1)


def say(text: str, *, last: bool = False) -> bool:
    """Write `text` as it is to `sys.stderr`, or to descriptor 2 if that fails. Raises no error.

    Args:
        last: whether this process is about to end. Then streams are skipped that nobody can read afterwards: a
            StringIO, pytest's capture.
    Returns: whether the text was written.
    """
    stream = sys.stderr
    with contextlib.suppress(Exception):  # stderr may be None, closed, full, or a user's object
        if _may_be_read(stream, last):
            stream.write(text)
            stream.flush()
            return True
    return _may_be_read(2, last) and write(2, text)


def _may_be_read(place: Any, last: bool) -> bool:
    """Return whether a text in `place`, a stream or descriptor 2, reaches a reader.

    Args: last: whether this process is about to end.
    """
    if _descriptor_of(place) == 2 and not _is_stderr():
        return False
    return not (last and _ends_with_us(place))


def _is_stderr() -> bool:
    """Return whether descriptor 2 is still the process's stderr.

    The program may have closed it, and opened a file that got the number 2.
    """
    with contextlib.suppress(OSError):
        return not fcntl.fcntl(2, fcntl.F_GETFD) & fcntl.FD_CLOEXEC  # children inherit a stderr
    return False


def _ends_with_us(place: Any) -> bool:
    """Return whether nobody can read the text in `place` once this process has ended: a StringIO, an unlinked file."""
    descriptor = _descriptor_of(place)
    if descriptor is None:  # a program's own class may write to a file, io's classes do not
        return isinstance(place, io.IOBase)
    status = os.fstat(descriptor)
    return stat.S_ISREG(status.st_mode) and not status.st_nlink


def _descriptor_of(place: Any) -> int | None:
    """Return the file descriptor of a stream; `place` if it is a number; None for a stream without one, or closed."""
    if isinstance(place, int):
        return place
    with contextlib.suppress(Exception):
        descriptor = place.fileno()
        if isinstance(descriptor, int):
            return descriptor
    return None


def write(descriptor: int, text: str) -> bool:
    """Write `text` to `descriptor`. Returns: whether all of it could be written. Raises no OSError.

    If a pipe is full, this waits for its reader; it gives up when the reader has taken nothing for 1 s.
    """
    data = text.encode(errors="replace")
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                if not poll.poll(_MILLISECONDS_FOR_A_READER):
                    return False
        return True
    return False


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return the ranks as text: "rank 3", "ranks 0-3, 7"."""
    numbers = sorted(ranks)
    runs = runs_in_words(numbers)
    if len(numbers) == 1:
        return f"rank {runs}"
    return f"ranks {runs}"


def runs_in_words(numbers: Iterable[int]) -> str:
    """Return the numbers as text, with runs shortened: "0-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = []
    for first, last in runs:
        text = str(first) if first == last else f"{first}-{last}"
        texts.append(text)
    return ", ".join(texts)
