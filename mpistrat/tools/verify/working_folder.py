"""A fresh working folder for each run. The program reads the user's files there, and overwrites none of them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

MOST_LINKS = 2_000  # in subfolders
_CACHES = {".cache", ".triton", "__pycache__"}
_SYSTEM = ("/dev/", "/proc/", "/sys/", "/memfd:")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# The audit events of calls that write or replace a file, and the number of the argument that has its path.
_CHANGES = {"open": 0, "os.truncate": 0, "os.remove": 0, "shutil.rmtree": 0, "os.rename": 1}


def fill(folder: Path, source: Path, left: int = MOST_LINKS) -> int:
    """Make links in `folder` to the files of `source`, so that relative paths find them.

    Subfolders become folders of links, so that new files in them are files of the run. Hidden subfolders become links
    themselves, and so do subfolders with more than `left` entries.
    Returns: the number of links that may still be made in subfolders.
    """
    for path in sorted(source.iterdir()):
        new = folder / path.name
        is_hidden = path.name.startswith(".") or path.is_symlink()
        is_folder = path.is_dir() and not is_hidden and os.access(path, os.R_OK)
        if is_folder and len(os.listdir(path)) <= left:
            new.mkdir()
            left = fill(new, path, left - len(os.listdir(path)))
        else:
            new.symlink_to(path.absolute())
    return left


class OverwriteError(SystemExit):
    """The program wanted to overwrite a file. It also ends a program that catches `Exception`."""


class FileGuard:
    """Stops the program before it overwrites or removes a file that was there before the run.

    Args:
        folder: the run's own folder.
        began: the time when the run began, in seconds; files that were changed since then are the run's. By default a
            second ago, because clocks of file systems are coarse.

    Attributes:
        outside: new files outside `folder` that the program has written.
        refused: the file that the program wanted to overwrite; "" if none.
        is_on: whether the guard looks at calls.
    """

    def __init__(self, folder: str, began: float | None = None) -> None:
        self._folder = os.path.realpath(folder)
        self._began = time.time() - 1.0 if began is None else began
        self.outside: set[str] = set()
        self.refused = ""
        self.is_on = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in _CHANGES:
            return
        path = arguments[_CHANGES[event]]
        reads = event == "open" and not (arguments[2] or 0) & _WRITES
        # A path beside the descriptor of a folder comes from shutil.rmtree.
        in_folder = event == "os.remove" and arguments[1] != -1
        if reads or in_folder or isinstance(path, int) or path is None:
            return
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        real = os.path.join(os.path.realpath(folder), name)
        if event in ("open", "os.truncate"):  # they follow a link
            real = os.path.realpath(real)
        is_own = real.startswith((self._folder, *_SYSTEM))
        if not is_own and not _CACHES.intersection(real.split(os.sep)):
            self._check(real)

    def _check(self, path: str) -> None:
        """Raise OverwriteError if `path` was there before the run."""
        if not os.path.lexists(path):
            self.outside.add(path)
            return
        is_data = os.path.isfile(path) or os.path.isdir(path)  # no pipe, no device
        if is_data and os.lstat(path).st_ctime < self._began:
            self.refused = path
            raise OverwriteError(1)
