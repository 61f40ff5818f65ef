"""A directory of checkpoints: a folder for each, which appears under its name when it is complete.

step-00000120/            complete; `step-00000120.2` is a later one of the same step
.unfinished-step-…-3f2a/  being written, or left by a job that was killed
.deleted-step-…-3f2a/     no longer wanted, and perhaps not gone yet
.lock                     held by the job that writes
"""

from __future__ import annotations

import contextlib
import os
import re

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.directory_lock import DirectoryLock
from mpistrat.checkpoint.manifest import Manifest, read_manifest

_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED, _DELETED = ".unfinished-", ".deleted-"


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
        if self._lock is not None:
            return
        if not os.path.isdir(self.path):
            durable_files.make_folders(self.path)
        self._lock = DirectoryLock.of(self.path)
        if self._lock.is_new:
            self._lock.is_new = False
            for name in self._names() if self._lock.held else ():
                if name.startswith((_UNFINISHED, _DELETED)):
                    self.remove(os.path.join(self.path, name))

    def begin(self, step: int | None) -> tuple[str, str, int, int]:
        """Make the folder of a new checkpoint. Returns: it, its path when complete, step and number of the save.

        Args:
            step: None is the one after the newest.
        """
        self.open()
        whole, _ = self.checkpoints()
        newest = whole[-1][1] if whole else Manifest(-1, 0, 0, {})
        if step is None:
            step = newest.step + 1
        name = f"step-{step:08}"
        found = [match for match in map(_COMPLETE.fullmatch, self._names()) if match]
        taken = [int(match[2] or 1) for match in found if int(match[1]) == step]
        if taken:
            name += f".{max(taken) + 1}"
        unfinished = os.path.join(self.path, f"{_UNFINISHED}{name}-{os.urandom(4).hex()}")
        durable_files.make_folder(unfinished)
        return unfinished, os.path.join(self.path, name), step, newest.number + 1

    def complete(self, unfinished: str, path: str, manifest: Manifest) -> None:
        """All files of a checkpoint are written: let it be one."""
        manifest.write(unfinished)
        durable_files.sync_folder(unfinished)
        durable_files.rename(unfinished, path)

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
            deleted = os.path.join(
                self.path, f"{_DELETED}{os.path.basename(path)}-{os.urandom(4).hex()}"
            )
            with contextlib.suppress(OSError):
                durable_files.rename(path, deleted)
                self.remove(deleted)
