"""A directory of checkpoints: a folder for each, which appears under its name when it is complete.

step-00000120/            complete; `step-00000120.2` is a later one of the same step
.unfinished-step-…-3f2a/  being written, or left by a job that was killed
.deleted-step-…-3f2a/     no longer wanted, and perhaps not gone yet
.lock                     held by the job that writes
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.directory_lock import DirectoryLock, Seen
from mpistrat.checkpoint.manifest import Manifest, read_manifest

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED, _DELETED = ".unfinished-", ".deleted-"


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        folder: in which; rank 0 makes it.
        path: its name when it is complete.
        step: which the program gave.
        number: by which checkpoints are ordered.
    """

    folder: str
    path: str
    step: int
    number: int


class Directory:
    """Looking needs nothing; what writes is for one process of the job that writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._lock: DirectoryLock | None = None

    def checkpoints(self) -> tuple[list[tuple[str, Manifest]], list[str]]:
        """The whole ones, oldest first, and what is wrong with the others."""
        whole: list[tuple[str, Manifest]] = []
        wrong = []
        for name in self._names():
            if _COMPLETE.fullmatch(name):
                path = os.path.join(self.path, name)
                try:
                    whole.append((path, read_manifest(path)))
                except ValueError as error:
                    wrong.append(str(error))
                except FileNotFoundError as error:
                    if os.path.isdir(path):  # else it was deleted meanwhile
                        wrong.append(f"{error.filename} is missing")
                except OSError as error:
                    wrong.append(str(error))
        whole.sort(key=lambda entry: entry[1].number)
        return whole, wrong

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def open(self) -> None:
        """Be the job that writes, and remove what killed ones have left, as far as that is possible.

        Raises: RuntimeError when another job is; OSError.
        """
        if not os.path.isdir(self.path):
            durable_files.make_folders(self.path)
        lock = DirectoryLock.of(self.path)
        if lock.seen is None:
            for name in self._names() if lock.held else ():
                if name.startswith((_UNFINISHED, _DELETED)):
                    self.remove(os.path.join(self.path, name))
        self._lock = lock
        self._look()

    def _look(self) -> None:
        assert self._lock is not None
        whole, _ = self.checkpoints()
        newest = whole[-1][1] if whole else Manifest(-1, 0, 0, {})
        self._lock.seen = Seen(newest.step, frozenset(self._names()))
        self._lock.number = max(self._lock.number, newest.number)

    def begin(self, step: int | None) -> Unfinished:
        """Names for a new checkpoint, of which nothing is on disk yet; after `open`, it asks no disk either.

        Args:
            step: None is the one after the newest.
        """
        assert self._lock is not None
        assert self._lock.seen is not None
        newest, names = self._lock.seen
        if step is None:
            step = newest + 1
        name = f"step-{step:08}"
        names = names | self._lock.under_way
        found = [match for match in map(_COMPLETE.fullmatch, names) if match]
        taken = [int(match[2] or 1) for match in found if int(match[1]) == step]
        if taken:
            name += f".{max(taken) + 1}"
        self._lock.under_way.add(name)
        self._lock.number += 1
        path = os.path.join(self.path, name)
        return Unfinished(self._new_folder(name), path, step, self._lock.number)

    def _new_folder(self, name: str) -> str:
        return os.path.join(self.path, f"{_UNFINISHED}{name}-{os.urandom(4).hex()}")

    def sample(self) -> str:
        """Make a folder, to be seen by others and removed."""
        folder = self._new_folder("sample")
        durable_files.make_folder(folder)
        return folder

    def complete(
        self, unfinished: Unfinished, ranks: int, files: Mapping[str, tuple[int, int]]
    ) -> None:
        """All files of a checkpoint are written: let it be one. `ranks`, `files`: as in its manifest."""
        step, number = unfinished.step, unfinished.number
        Manifest(step, number, ranks, files).write(unfinished.folder)
        durable_files.sync_folder(unfinished.folder)
        durable_files.rename(unfinished.folder, unfinished.path)
        assert self._lock is not None
        assert self._lock.seen is not None
        name = os.path.basename(unfinished.path)
        self._lock.seen = Seen(step, self._lock.seen.names | {name})
        self._end(unfinished)

    def give_up(self, unfinished: Unfinished) -> None:
        """It cannot be completed: remove what was written of it."""
        self._delete(unfinished.folder)
        self._end(unfinished)

    def _end(self, unfinished: Unfinished) -> None:
        assert self._lock is not None
        self._lock.under_way.discard(os.path.basename(unfinished.path))

    def remove(self, path: str) -> None:
        """Remove what is no checkpoint, as far as that is possible: on NFS, not what somebody reads."""
        import shutil  # here, because it makes importing mpistrat slower

        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def keep_newest(self, count: int) -> None:
        """Delete all whole checkpoints but the newest `count`, as far as that is possible."""
        whole, _ = self.checkpoints()
        for path, _ in whole[:-count]:
            self._delete(path)
        self._look()

    def _delete(self, path: str) -> None:
        """Remove a folder, as far as that is possible. By another name first: nobody counts it, or adds to it, then."""
        name = os.path.basename(path).removeprefix(_UNFINISHED)
        deleted = os.path.join(self.path, f"{_DELETED}{name}-{os.urandom(4).hex()}")
        with contextlib.suppress(OSError):
            durable_files.rename(path, deleted)
            self.remove(deleted)
