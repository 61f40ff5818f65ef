"""`StderrProxy`: writes to the stderr of other processes, for a process that has no stderr.

A launcher waits for the end of each pipe that it gave its ranks. So a process that outlives the ranks must not hold
such a pipe for long. The observer opens it to print something, and closes it afterwards.
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
    """Opens the stderr of one process at a time, and writes to it.

    Attributes: owner: the pid of the process that owns the stderr opened last; None before the first.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self.owner: int | None = None

    def borrow(self, pids: Iterable[int]) -> int | None:
        """Open the stderr of the first process in `pids` that has a usable stderr, unless a stderr is open already.

        /dev/null, a deleted file, and a file that this process may not open, are not usable.

        Returns: the file descriptor of the open stderr; None if no stderr is open now.
        """
        for pid in pids if self._file is None else ():
            self._file = _stderr_of(pid)
            self.owner = pid
            if self._file is not None:
                break
        return self._file

    def say(self, text: str, pids: Iterable[int]) -> bool:
        """Write `text` to the open stderr; if that fails, to the stderr of the first process in `pids` that works.

        Returns: whether the text was written.
        """
        candidates = iter(pids)
        while (file := self.borrow(candidates)) is not None:
            if write(file, text):
                return True
            self.give_back()
        return False

    def give_back(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def say_on_launcher(pid: int, text: str) -> bool:
    """Write `text` to the stderr of the launcher or daemon that started the process `pid` on this node.

    Returns: whether the text was written; False if no launcher is found.
    """
    launcher = launcher_of(pid)
    return launcher is not None and StderrProxy().say(text, (launcher,))


def _stderr_of(pid: int) -> int | None:
    path = f"/proc/{pid}/fd/2"
    with contextlib.suppress(OSError):
        kind = os.readlink(path)  # does not touch the file itself: its file system may hang
        if kind in _SILENT or kind.endswith(" (deleted)"):  # nobody would read the text
            return None
        if not kind.startswith(_WITHOUT_OFFSET):
            # A file that is opened again would have a second offset, and a socket cannot be opened.
            with contextlib.suppress(OSError):
                return _shared(pid)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        return os.open(path, flags)
    return None


def _shared(pid: int) -> int:
    """Return a duplicate of the stderr descriptor of the process `pid`: both share one offset in the file.

    Raises: OSError before Linux 5.6, or if this process may not trace the process `pid`.
    """
    pidfd = open_pidfd(pid)
    try:
        return syscall(438, pidfd, 2, 0)  # pidfd_getfd
    finally:
        os.close(pidfd)
