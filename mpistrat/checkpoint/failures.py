"""Adds the file, its sizes and the rank to errors about files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from mpistrat.errors import counted


@contextlib.contextmanager
def naming(path: str, sizes: Callable[[], str]) -> Iterator[None]:
    """A context around operations on a file. An OSError of its block is replaced by one with `path` and `sizes()`.

    The new OSError has the same errno, and its traceback does not show the original error. Other errors pass unchanged.

    Args:
        path: the file's path, the `filename` of the new error.
        sizes: called after an error; it says how far the operation came: "0 of 12 bytes are read".
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({sizes()})", path) from None


@contextlib.contextmanager
def on_rank(rank: int) -> Iterator[None]:
    """A context that adds ", on rank 3" to the text of an OSError or ValueError of its block.

    An OSError without errno passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # an error of this package, such as TimeoutError
            raise
        text = f"{error.strerror}, on rank {rank}"
        raise OSError(error.errno, text, error.filename, None, error.filename2) from None
    except ValueError as error:
        raise ValueError(f"{error}, on rank {rank}") from None


def on_ranks(ranks: Sequence[int]) -> str:
    text = f"on rank {ranks[0]}"
    others = len(ranks) - 1
    if others:
        text += f" and {counted(others, 'other')}"
    return text


def free_bytes(path: str) -> str:
    """Return a text for messages: how many bytes are free on the file system of `path`, or that nobody knows."""
    with contextlib.suppress(OSError):
        system = os.statvfs(os.path.dirname(path))
        return f"{system.f_frsize * system.f_bavail} bytes are free"
    return "nobody knows how many bytes are free"
