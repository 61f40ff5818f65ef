"""The directory of checkpoints. Each checkpoint is a folder, and gets its final name when it is complete.

step-00000120/            a complete checkpoint; a second one of the same step is `step-00000120.2`
.unfinished-step-…-3f2a/  a checkpoint that is being written, or that a killed job has left
.deleted-step-…-3f2a/     a checkpoint that is being deleted
.lock                     a file that the job that writes keeps locked
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import stat
import weakref
from collections.abc import Mapping

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.manifest import Manifest, read_manifest

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = ".unfinished-"
_DELETED = ".deleted-"
_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: weakref.WeakValueDictionary[tuple[int, int], DirectoryLock] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class UnfinishedCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        folder: path of the folder with its files; rank 0 makes the folder.
        path: path of the folder when it is complete.
        step: the program's step number.
        number: number of the save among all saves in the directory; the newest checkpoint has the highest.
    """

    folder: str
    path: str
    step: int
    number: int


class Directory:
    """A directory of checkpoints, to be read by any rank. Attributes: path: its absolute path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def checkpoints(self) -> tuple[list[tuple[str, Manifest]], list[str]]:
        """Return the complete checkpoints as (path, manifest), oldest first, and an error text for each damaged one.

        Returns: two empty lists if the directory does not exist.
        """
        whole: list[tuple[str, Manifest]] = []
        wrong = []
        for name in self.names():
            if _COMPLETE.fullmatch(name):
                path = os.path.join(self.path, name)
                try:
                    whole.append((path, read_manifest(path)))
                except FileNotFoundError as error:
                    if os.path.isdir(path):  # otherwise it was deleted meanwhile
                        wrong.append(f"{error.filename} is missing")
                except (ValueError, OSError) as error:
                    wrong.append(str(error))
        whole.sort(key=lambda entry: entry[1].number)
        return whole, wrong

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return os.listdir(self.path)
        return []


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
        path = os.path.join(directory, ".lock")
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
            if error.errno not in _LOCKS_UNSUPPORTED:
                raise
            self.held = False
        with contextlib.suppress(OSError):  # a text for the error message above
            os.ftruncate(file, 0)
            holder = f"process {os.getpid()} on {os.uname().nodename}\n"
            os.pwrite(file, holder.encode(), 0)


def _leave_to_parent() -> None:
    """Close the lock files in a forked child. The kernel would otherwise keep the locks until the child ends, too."""
    for lock in list(_held.values()):
        lock._close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class OpenDirectory:
    """A directory of checkpoints in which rank 0 writes. It holds the directory's lock.

    The constructor makes the directory. If the process had not locked it before, it also removes the leftovers of
    killed jobs; on NFS, files that another process reads stay.

    Raises: RuntimeError if another job writes there; OSError.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._path = directory.path
        # mkdir of an existing folder may raise another error than EEXIST, such as EACCES for the parent.
        if not os.path.isdir(self._path):
            durable_files.make_folders(self._path)
        self._lock = DirectoryLock.of(self._path)
        if self._lock.is_new and self._lock.held:
            for name in directory.names():
                if name.startswith((_UNFINISHED, _DELETED)):
                    self.remove(os.path.join(self._path, name))
        self._look()

    def _look(self) -> None:
        whole, _ = self._directory.checkpoints()
        newest = Manifest(-1, 0, 0, {})
        if whole:
            _, newest = whole[-1]
        names = self._directory.names()
        self._lock.newest = newest.step
        self._lock.names = frozenset(names)
        self._lock.number = max(self._lock.number, newest.number)
        self._lock.is_new = False

    def reserve(self, step: int | None) -> UnfinishedCheckpoint:
        """Reserve the names of a new checkpoint, without any access to the disk.

        Args:
            step: the program's step number; None is the newest checkpoint's plus 1.
        Returns: the reserved checkpoint. `complete` or `give_up` ends the reservation.
        """
        if step is None:
            step = self._lock.newest + 1
        name = f"step-{step:08}"
        taken: list[int] = []
        for other in self._lock.names | self._lock.under_way:
            match = _COMPLETE.fullmatch(other)
            if match and int(match[1]) == step:
                taken.append(int(match[2] or 1))
        if taken:
            name += f".{max(taken) + 1}"
        self._lock.under_way.add(name)
        self._lock.number += 1
        path = os.path.join(self._path, name)
        return UnfinishedCheckpoint(self._new_folder(name), path, step, self._lock.number)

    def _new_folder(self, name: str) -> str:
        return self._random_path(f"{_UNFINISHED}{name}")

    def _random_path(self, name: str) -> str:
        suffix = os.urandom(4).hex()
        return os.path.join(self._path, f"{name}-{suffix}")

    def sample(self) -> str:
        """Make a folder that other ranks look for, and return its path. The caller removes it."""
        folder = self._new_folder("sample")
        durable_files.make_folder(folder)
        return folder

    def complete(
        self, unfinished: UnfinishedCheckpoint, ranks: int, files: Mapping[str, tuple[int, int]]
    ) -> None:
        """Complete a checkpoint: write its manifest, and give its folder the final name.

        Called by: rank 0's thread, when all other files are on disk.
        Args:
            ranks: number of ranks that wrote the checkpoint.
            files: (bytes, CRC-32) of each file but the manifest, by name.
        """
        step = unfinished.step
        number = unfinished.number
        Manifest(step, number, ranks, files).write(unfinished.folder)
        durable_files.sync_folder(unfinished.folder)
        durable_files.rename(unfinished.folder, unfinished.path)
        name = os.path.basename(unfinished.path)
        self._lock.newest = step
        self._lock.names |= {name}
        self._lock.under_way.discard(name)

    def give_up(self, unfinished: UnfinishedCheckpoint) -> None:
        """Delete the folder of a checkpoint that cannot be completed, and end its reservation."""
        self._delete(unfinished.folder)
        self._lock.under_way.discard(os.path.basename(unfinished.path))

    def remove(self, path: str) -> None:
        """Remove a file or a folder, as far as that is possible: errors are ignored."""
        import shutil  # imported here, so that `import mpistrat` stays fast

        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def keep_newest(self, count: int) -> None:
        """Delete all complete checkpoints but the newest `count`. Errors of the deletion are ignored."""
        whole, _ = self._directory.checkpoints()
        for path, _ in whole[:-count]:
            self._delete(path)
        self._look()

    def _delete(self, path: str) -> None:
        """Delete a folder; errors are ignored.

        The folder is renamed first, so that nobody takes it for a checkpoint or adds files to it.
        """
        name = os.path.basename(path).removeprefix(_UNFINISHED)
        deleted = self._random_path(f"{_DELETED}{name}")
        with contextlib.suppress(OSError):
            durable_files.rename(path, deleted)
            self.remove(deleted)
