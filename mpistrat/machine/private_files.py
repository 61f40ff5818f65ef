"""Files and folders for this user alone, whatever the umask is. What others have put in their place is not used."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: nobody else can read a file that it creates. An existing file keeps its permissions."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def create(path: str, *, binary: bool = False) -> Any:
    """A new file, open for writing, in place of one that was there; a link is not followed, but replaced.

    Raises: OSError, also if the one that was there is another user's, in a folder like /tmp.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    mode, encoding = ("xb", None) if binary else ("x", "utf-8")
    return open(path, mode, encoding=encoding, opener=private)


def make_folder(path: str) -> None:
    """Make the folder and those above it, as far as they are missing."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_folder(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
