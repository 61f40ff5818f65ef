"""Errors about files, with the file, its sizes and the rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def naming(path: str, sizes: Callable[[], str]) -> Iterator[None]:
    """An OSError of the body names `path`, and has the text of `sizes`. It is the only one that is printed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({sizes()})", path) from None


@contextlib.contextmanager
def on_rank(rank: int) -> Iterator[None]:
    """An error of the body about a file names the rank, too."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence of ours
            raise
        text = f"{error.strerror}, {on_ranks([rank])}"
        raise OSError(error.errno, text, error.filename, None, error.filename2) from None
    except ValueError as error:
        raise ValueError(f"{error}, {on_ranks([rank])}") from None


def on_ranks(ranks: Sequence[int]) -> str:
    more = len(ranks) - 1
    return f"on rank {ranks[0]}" + (f" and {more} other{'s' * (more > 1)}" if more else "")


def free_bytes(path: str) -> str:
    """Of the file system that a file is in, for people."""
    with contextlib.suppress(OSError):
        system = os.statvfs(os.path.dirname(path))
        return f"{system.f_frsize * system.f_bavail} bytes are free"
    return "nobody knows how many bytes are free"
