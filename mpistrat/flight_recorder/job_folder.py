"""A folder in shared memory for the ranks of a job on one node, and the removal of those that killed jobs left behind.

Each process of the job holds a shared lock on the folder's lock file; the kernel releases it when the process ends, in
whatever way. So a folder whose lock can be had exclusively belongs to nobody, and a living job's is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid

_LOCK = ".lock"
_MAPPINGS = "mappings-"
_RECORD = "rank-"


def ranks_in(folder: str) -> list[int]:
    """The ranks that have a record there, or are just making it."""
    names = (name.removeprefix(_RECORD) for name in os.listdir(folder) if name.startswith(_RECORD))
    return sorted(int(rank) for rank in names)


def record_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"{_RECORD}{rank}")


def stacks_of(folder: str, rank: int) -> str:
    """What faulthandler writes for the rank."""
    return os.path.join(folder, f"stacks-{rank}")


def report_of(folder: str) -> str:
    """Where the observer's words are kept while the job lives."""
    return os.path.join(folder, "report")


def _roots() -> list[str]:
    return [
        os.path.join(place, f"mpistrat-{os.getuid()}")
        for place in ("/dev/shm", tempfile.gettempdir())
    ]


class JobFolder:
    """Held from when it is made until this process ends."""

    def __init__(self, path: str) -> None:
        """Join the folder that another process of the job has made."""
        self.path = path
        self._lock = os.open(path + _LOCK, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @classmethod
    def create(cls) -> JobFolder:
        """A new folder, in memory if there is any. Raises: OSError."""
        error: OSError | None = None
        for root in _roots():
            try:
                os.makedirs(root, mode=0o700, exist_ok=True)
                if os.stat(root).st_uid != os.getuid():
                    raise PermissionError(f"{root} belongs to another user")
                path = os.path.join(root, uuid.uuid4().hex)
                return cls._locked(path)
            except OSError as failed:
                error = failed
        raise error or OSError("no folder for temporary files")

    @classmethod
    def _locked(cls, path: str) -> JobFolder:
        while True:
            os.close(os.open(path + _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with contextlib.suppress(FileNotFoundError):  # a cleaner was faster than our lock
                folder = cls(path)
                if os.stat(path + _LOCK).st_ino == os.fstat(folder._lock).st_ino:
                    os.mkdir(path, 0o700)
                    return folder

    def remember_mappings(self, rank: int) -> None:
        """Note which files in memory this process maps: MPI's, which nobody else removes when it is killed."""
        with open(os.path.join(self.path, f"{_MAPPINGS}{rank}"), "w", encoding="utf-8") as file:
            file.writelines(f"{inode} {path}\n" for inode, path in sorted(_shared_mappings()))

    def remove(self) -> None:
        """Remove the folder and the mappings that are noted in it; no process of the job lives any more."""
        _remove(self.path)


def _shared_mappings() -> set[tuple[int, str]]:
    """(inode, path) of the files in /dev/shm that are mapped by this process and not ours."""
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                path = fields[5]
                ours = path.startswith(f"/dev/shm/mpistrat-{os.getuid()}/")
                if not path.endswith(" (deleted)") and not ours:
                    found.add((int(fields[4]), path))
    return found


def remove_leftovers() -> list[str]:
    """Remove what this user's killed jobs left on this machine; returns the folders removed."""
    removed = []
    for root in _roots():
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(root)):
                if name.endswith(_LOCK) and _abandoned(os.path.join(root, name)):
                    path = os.path.join(root, name.removesuffix(_LOCK))
                    _remove(path)
                    removed.append(path)
    return removed


def _abandoned(lock: str) -> bool:
    with contextlib.suppress(OSError):
        file = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(file)
    return False


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name.startswith(_MAPPINGS):
                _remove_mappings(os.path.join(path, name))
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path + _LOCK)


def _remove_mappings(listed: str) -> None:
    with open(listed, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            inode, path = line.rstrip("\n").split(" ", 1)
            with contextlib.suppress(OSError):
                status = os.lstat(path)  # the same name may be another job's file by now
                if status.st_ino == int(inode) and status.st_uid == os.getuid():
                    os.unlink(path)
