"""Make files and folders that only this user can read, whatever the umask is.

A file that another user has put in the place of such a file is not used.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any


def private(path: str, flags: int) -> int:
    """Open `path`, as the `opener` of `open`. A file that this creates gets mode 0600: nobody else can read it.

    An existing file keeps its permissions.   Returns: the file descriptor.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def create(path: str, *, binary: bool = False) -> Any:
    """Create the file `path` with mode 0600, and return it open for writing. A file or link that is there is removed.

    Args: binary: False: a text file in UTF-8.
    Raises: OSError if the file cannot be created: also if another user's file is there, in a folder like /tmp.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    if binary:
        return open(path, "xb", opener=private)
    return open(path, "x", encoding="utf-8", opener=private)


def make_folder(path: str) -> None:
    """Make the folder `path` and its missing parents, for this user alone (mode 0700).

    Folders that exist keep their mode.

    Raises: OSError if a folder cannot be made, or if `path` is a file.
    """
    folder = Path(path)
    if not folder.parent.is_dir():
        make_folder(str(folder.parent))
    folder.mkdir(mode=0o700, exist_ok=True)
