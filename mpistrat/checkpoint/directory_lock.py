"""Lets one job at a time write checkpoints into a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import weakref

NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: weakref.WeakValueDictionary[tuple[int, int], DirectoryLock] = weakref.WeakValueDictionary()


class DirectoryLock:
    """A lock on a directory, held by this process.

    The process holds the lock until no object refers to the `DirectoryLock`. The kernel releases the lock of a process
    that is killed. A forked child does not have the lock.

    Attributes:
        held: False if the file system has no locks; then another job may write into the directory unnoticed.
        is_new: whether no manager of this process has looked into the directory yet.
        newest: step of the newest checkpoint at the last look; -1 if there was none.
        names: all names in the directory at the last look, as a frozenset.
        number: number of the newest checkpoint that was there, or that this process has reserved since.
        under_way: names of the checkpoints that this process has reserved, and neither completed nor given up. After a
            strategy has lost a rank, these may be several.
    """

    @classmethod
    def of(cls, directory: str) -> DirectoryLock:
        """Return the lock of `directory`, an existing folder. All managers of the process share one lock object.

        Raises: RuntimeError if another process holds the lock; OSError.
        """
        status = os.stat(directory)
        key = (status.st_dev, status.st_ino)
        lock = _held.get(key)
        if lock is None:
            lock = _held[key] = cls(directory)
        return lock

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, NAME)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(path, flags, 0o600)
        self._close = weakref.finalize(self, os.close, file)
        self._close.atexit = False
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file, and a lock must be one", path)
        os.fchmod(file, 0o600)
        self.held = True
        self.is_new = True
        self.newest = -1
        self.names: frozenset[str] = frozenset()
        self.number = 0
        self.under_way: set[str] = set()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip()
            raise RuntimeError(
                f"another job, {holder or 'which has just begun'}, writes checkpoints into {directory}. (Ranks of a "
                "job save together in one strategy, such as MultiWorkerMirroredStrategy; in a OneDeviceStrategy each "
                "is like a job of its own.) Give each job a directory of its own, or wait until that job has ended"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.held = False
        with contextlib.suppress(OSError):  # a text for the error message above
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)


def _leave_to_parent() -> None:
    """Close the lock files in a forked child. The kernel would otherwise keep the locks until the child ends, too."""
    for lock in list(_held.values()):
        lock._close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
