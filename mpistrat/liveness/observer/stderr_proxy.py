"""Standard error of other processes, for a process that has none of its own.

A launcher waits for the end of each pipe that it gave its ranks. So whoever outlives the ranks must not hold one: the
observer opens it when there is something to say, and closes it then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from mpistrat.liveness.processes import launcher_of, open_pidfd, syscall
from mpistrat.machine.notices import write

_SILENT = ("/dev/null", "/dev/full")
_WITHOUT_OFFSET = ("pipe:", "/dev/")


class StderrProxy:
    """That of one process, the owner, at a time."""

    def __init__(self) -> None:
        self._file: int | None = None
        self.owner: int | None = None

    def borrow(self, pids: Iterable[int]) -> bool:
        """Open that of the first of the processes which has one, unless one is open; returns whether one is."""
        for pid in pids if self._file is None else ():
            self._file, self.owner = _stderr_of(pid), pid
            if self._file is not None:
                break
        return self._file is not None

    def say(self, text: str, pids: Iterable[int]) -> bool:
        """Write it to the one that is open, else to that of the first of the processes where it can be written."""
        candidates = iter(pids)
        while self.borrow(candidates):
            if write(self._file or 0, text):
                return True
            self.give_back()
        return False

    def give_back(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def say_on_launcher(pid: int, text: str) -> bool:
    """On stderr of what started the process on this node; returns whether it was written."""
    launcher = launcher_of(pid)
    return launcher is not None and StderrProxy().say(text, (launcher,))


def _stderr_of(pid: int) -> int | None:
    path = f"/proc/{pid}/fd/2"
    with contextlib.suppress(OSError):
        kind = os.readlink(path)  # asks no file system
        if kind in _SILENT or kind.endswith(" (deleted)"):  # nobody would read it
            return None
        if not kind.startswith(_WITHOUT_OFFSET):
            # A file opened once more would have an offset of its own, and a socket cannot be opened.
            with contextlib.suppress(OSError):
                return _shared(pid)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        return os.open(path, flags)
    return None


def _shared(pid: int) -> int:
    """The process's own descriptor, as if it had been inherited.

    Raises: OSError before Linux 5.6, and where processes may not be traced.
    """
    pidfd = open_pidfd(pid)
    try:
        return syscall(438, pidfd, 2, 0)  # pidfd_getfd
    finally:
        os.close(pidfd)
