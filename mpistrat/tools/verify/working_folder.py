"""A fresh working folder for each run. The program reads the user's files there, and overwrites none of them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mpistrat.tools.verify.recording import Recording

MOST_LINKS = 2_000  # in subfolders
_FREE = re.compile(r"/(dev|proc|sys)/|/memfd:|.*/(\.cache|\.triton|__pycache__)/")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# The audit events of calls that write or replace a file, and the number of the argument that has its path.
_CHANGES = {"open": 0, "os.truncate": 0, "os.remove": 0, "shutil.rmtree": 0, "os.rename": 1}


def fill(folder: Path, source: Path, left: int = MOST_LINKS) -> int:
    """Make links in `folder` to the files of `source`, an absolute path, so that relative paths find them.

    Subfolders become folders of links, so that new files in them are files of the run. Hidden subfolders become links
    themselves, and so do subfolders with more than `left` entries.
    Returns: the number of links that may still be made in subfolders.
    """
    for path in source.iterdir():
        new = folder / path.name
        count = left + 1
        is_hidden = path.name.startswith(".") or path.is_symlink()
        if path.is_dir() and not is_hidden and os.access(path, os.R_OK):
            count = len(os.listdir(path))
        if count <= left:
            new.mkdir()
            left = fill(new, path, left - count)
        else:
            new.symlink_to(path)
    return left


def guard(recording: Recording, folder: str) -> None:
    """Have this process end before it overwrites or removes a file that was there before the run.

    SystemExit also ends a program that catches `Exception`.
    Args:
        recording: gets new files as `outside`, and the file that the program wanted to overwrite as `refused`. Files
            that are in `outside` already are of earlier runs, and may be overwritten.
        folder: the run's own folder. Nothing in it itself has changed since the run began.
    """
    began = os.stat(folder).st_mtime
    own = os.path.realpath(folder)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "mpistrat.servers":
            raise SystemExit("mpistrat verify compares no jobs with parameter servers")
        recording.by_files |= event == "mpistrat.files"
        if event not in _CHANGES:
            return
        path = arguments[_CHANGES[event]]
        reads = event == "open" and not arguments[2] & _WRITES
        # A path beside the descriptor of a folder comes from shutil.rmtree.
        in_folder = event == "os.remove" and arguments[1] != -1
        if reads or in_folder or not isinstance(path, (str, bytes, os.PathLike)):
            return
        real = os.path.realpath(os.fsdecode(path))
        # These change the file that a link leads to, and the others the link.
        changed = real if event in ("open", "os.truncate") else path
        if _FREE.match(real) or real in recording.outside:
            return
        if os.path.lexists(changed):
            if os.lstat(changed).st_ctime < began:
                recording.refused = real
                raise SystemExit(1)
        elif not real.startswith(own):
            recording.outside.add(real)

    sys.addaudithook(hear)
