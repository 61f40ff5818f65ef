"""The job's folder: a folder in shared memory for a job's ranks on one node. Folders of killed jobs are removed.

Each process of the job holds a shared lock on the folder's lock file. The kernel releases the lock when the process
ends, however it ends. So if a process can lock the file exclusively, no process of the job lives, and the folder may be
removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mpistrat.liveness import deadlines
from mpistrat.liveness.processes import process_namespace, text_in
from mpistrat.machine.private_files import create, make_folder, private

SHARED_MEMORY = "/dev/shm"
_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW
_MAPPINGS = "mappings-"
_RECORD = "rank-"


def ranks_in(folder: str) -> dict[int, int]:
    """Return a dict from each rank with a record in the job's folder to the inode of the record's file, in rank order.

    A record may be unfinished: then `RankRecord` raises OSError or ValueError for it.
    """
    inodes: dict[int, int] = {}
    for entry in os.scandir(folder):
        if entry.name.startswith(_RECORD):
            rank = int(entry.name.removeprefix(_RECORD))
            inodes[rank] = entry.inode()
    return dict(sorted(inodes.items()))


def record_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"{_RECORD}{rank}")


def stacks_of(folder: str, rank: int) -> str:
    """Return the path of the file to which faulthandler writes the rank's stacks."""
    return os.path.join(folder, f"stacks-{rank}")


def line_of(folder: str, rank: int) -> str:
    """Return the path of a FIFO that the rank holds open, so that the observer sees when its files are closed."""
    return os.path.join(folder, f"line-{rank}")


def words_of(folder: str, rank: int) -> str:
    """Return the path of a file with text that the observer prints for a rank without a usable stderr."""
    return os.path.join(folder, f"words-{rank}")


def report_of(folder: str) -> str:
    """Return the path of the file with the report of a stall. Ranks raise StallError with this text."""
    return os.path.join(folder, "report")


def note_members(folder: str, group: int, ranks: Sequence[int]) -> None:
    """Write the ranks of a group to the job's folder, so that the observer knows ranks that have not made the group.

    Such a rank's record says nothing of the group.

    Args:
        group: the hash of the group's name.
        ranks: the group's ranks, as numbers in the job.
    """
    with create(os.path.join(folder, f"members-{group:x}")) as file:
        file.write(" ".join(str(rank) for rank in ranks))


def members_of(folder: str, group: int) -> set[int]:
    """Return the ranks of the group that `note_members` wrote, as numbers in the job; an empty set if it wrote none."""
    numbers = text_in(os.path.join(folder, f"members-{group:x}"))
    return {int(number) for number in numbers.split()}


# Files that MPI libraries and their transports make in /dev/shm. Nobody removes them when a job is killed.
_OF_MPI = re.compile(
    r"/dev/shm/(?:"
    r"mpich_shm_|mpich_|"  # mpich_shm_e381180_0
    r"sm_segment\.|vader_segment\.|open_mpi\.|ompi\.|"  # Open MPI: sm_segment.node7.0.1a2b0001.0
    r"ucx_shm_|"  # UCX: ucx_shm_posix_5f3a
    r"(?:im)?pi_shm_|Intel_MPI_|shm-col-space-|"  # Intel MPI: Intel_MPI_k3b2c1
    r"mvapich|"
    r"fi_shm_|psm2_shm\.|psm3_shm\."  # libfabric and PSM
    r")"
)
# A line of /proc/PID/maps: address, rights, offset, device, inode, and such a file, which still exists.
_MAPPING = re.compile(rf"(?m)^(?:\S+ ){{4}}(\d+) +({_OF_MPI.pattern}.*)(?<! \(deleted\))$")
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, <linux/proc_ns.h>
_INIT = "1"  # the first process of this namespace, never a rank
_LOCK_OF_A_JOB = re.compile(rf"[0-9A-Za-z-]{{8,80}}{re.escape(_LOCK)}")


def _places() -> Iterator[str]:
    yield SHARED_MEMORY
    import tempfile  # imported here, so that `import mpistrat` stays fast

    yield tempfile.gettempdir()


def _of_this_user() -> str:
    return f"mpistrat-{os.getuid()}"


def _is_ours(folder: str) -> bool:
    """Whether `folder` is a folder (no link) of this user that nobody else can write to. Raises: OSError without it."""
    status = os.lstat(folder)
    private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return stat.S_ISDIR(status.st_mode) and private


def _check(folder: str) -> None:
    if not _is_ours(folder):
        raise PermissionError(f"{folder} is not a folder of this user's alone")


def lock(file: Any) -> bool:
    """Try to lock an open file exclusively, without waiting. The lock lasts until the file is closed.

    Returns: False if another process holds a lock on the file.   Raises: OSError if the file cannot be locked at all.
    """
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class JobFolder:
    """The job's folder. This process holds a shared lock on the folder's lock file until `leave`, or until it ends.

    No process removes a folder while another process holds such a lock.
    """

    def __init__(self, path: str) -> None:
        """Take a shared lock on the folder `path`; wait while another process locks it exclusively.

        Raises: OSError if the folder has no lock file.
        """
        self.path = path
        self._lock = os.open(path + _LOCK, _LOCK_FLAGS)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    @classmethod
    def create(cls, name: str) -> tuple[JobFolder, bool]:
        """Make the folder of the job called `name`, or join it if another process of the job has made it.

        It is in /dev/shm; if no folder can be made there, it is among the temporary files.

        Returns: the folder, and whether this process has made it.   Raises: OSError if no folder can be made.
        """
        for place in _places():
            with contextlib.suppress(OSError):
                root = os.path.join(place, _of_this_user())
                make_folder(root)
                _check(root)
                return cls._locked(os.path.join(root, name))
        error = OSError("no folder for temporary files")
        # Another user has taken the user's folder: use a name that nobody can foresee.
        for place in _places():
            try:
                return cls._locked(os.path.join(place, f"{_of_this_user()}-{name}"))
            except OSError as failed:
                error = failed
        raise error

    @classmethod
    def _locked(cls, path: str) -> tuple[JobFolder, bool]:
        while True:
            made = os.open(path + _LOCK, _LOCK_FLAGS | os.O_CREAT, 0o600)
            os.close(made)
            # The lock file is gone if a cleaner has removed it before we locked it.
            with contextlib.suppress(FileNotFoundError):
                folder = cls(path)
                status = os.fstat(folder._lock)
                if status.st_uid != os.getuid():
                    raise PermissionError(f"{path}{_LOCK} is another user's")
                if os.stat(path + _LOCK).st_ino == status.st_ino:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(path, 0o700)
                        return folder, True
                    _check(path)
                    return folder, False

    @contextlib.contextmanager
    def alone(self, role: str) -> Iterator[bool]:
        """Hold the lock `role` of the folder in the block. It does not wait for the lock.

        Yields True, or False if another process is inside a block with the same `role`.
        """
        with open(os.path.join(self.path, role), "a", opener=private) as file:
            yield lock(file)

    def remember_mappings(self, rank: int) -> None:
        """Write to the job's folder a list of MPI's files in /dev/shm that this process maps.

        If this process is killed, MPI does not remove the files; `remove_if_last` does, or another job of this user.

        Args: rank: the process's rank, for the list's name.   Called by: each rank, once MPI has mapped its files.
        """
        with create(os.path.join(self.path, f"{_MAPPINGS}{rank}")) as file:
            for inode, path in sorted(_shared_mappings().items()):
                file.write(f"{inode} {path}\n")

    def remove_if_last(self) -> bool:
        """Remove the folder, and MPI's files that ranks have listed in it, unless another process of the job lives.

        Called by: the observer, when no rank is left.
        Returns: True if no other process holds a lock on the folder, so that it was removed; else False.
        """
        if lock(self._lock):
            _remove(self.path)
            return True
        # The failed attempt may have released the shared lock.
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return False


def _shared_mappings(pid: str = "self") -> dict[int, str]:
    """Return the paths of MPI's files in /dev/shm that the process `pid` maps, by inode, without deleted files."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
        files = _MAPPING.findall(maps.read())
    return {int(inode): path for inode, path in files}


def remove_leftovers() -> list[str]:
    """Remove the folders and MPI's files that this user's killed jobs left on this machine.

    Called by: the first rank of each node, when it builds a strategy. Returns: the paths that were removed.
    """
    removed = []
    for place in _places():
        root = os.path.join(place, _of_this_user())
        with contextlib.suppress(OSError):
            begins = f"{_of_this_user()}-"
            entries = os.scandir(place)
            found = [entry.path for entry in entries if entry.name.startswith(begins)]
            if _is_ours(root):
                found += [entry.path for entry in os.scandir(root)]
            for file in sorted(found):
                path = file.removesuffix(_LOCK)
                of_a_job = _LOCK_OF_A_JOB.fullmatch(os.path.basename(file))
                if of_a_job and _remove_if_abandoned(path):
                    removed.append(path)
    with contextlib.suppress(OSError):
        removed += _remove_unmapped()
    return removed


def _remove_unmapped() -> list[str]:
    """Remove MPI's files of this user in /dev/shm that no process maps. Jobs that were killed early leave such files.

    In a container with a pid namespace of its own it removes nothing, because processes outside may map the files.
    Files that were changed in the last minute stay, too, because a starting job may be about to map them.

    Returns: the removed paths.   Raises: OSError if a process of this user hides its mappings.
    """
    if process_namespace() != _INITIAL_PID_NAMESPACE:
        return []
    old = time.time() - deadlines.CLEANER_WAITS_FOR_MAPPING
    left = {
        entry.inode(): entry.path
        for entry in os.scandir(SHARED_MEMORY)
        if _OF_MPI.match(entry.path)
        and entry.is_file(follow_symlinks=False)
        and entry.stat(follow_symlinks=False).st_uid == os.getuid()
        and entry.stat(follow_symlinks=False).st_mtime < old
    }
    mapped = _mapped_by_any() if left else set()
    abandoned = []
    for inode, path in left.items():
        if inode not in mapped:
            abandoned.append(path)
            with contextlib.suppress(OSError):
                os.unlink(path)
    return abandoned


def _mapped_by_any() -> set[int]:
    """Return the inodes of all of MPI's files in /dev/shm that some process of this machine maps.

    Raises: PermissionError if a process of this user hides its mappings.
    """
    inodes: set[int] = set()
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    for pid in processes:
        try:
            inodes.update(_shared_mappings(pid))
        except PermissionError:
            if pid != _INIT and _is_process_of_ours(pid):
                raise
        except OSError:  # the process has ended
            continue
    return inodes


def _is_process_of_ours(pid: str) -> bool:
    """Whether the process has this user's real uid. (The /proc files of protected processes belong to root.)"""
    return f"\nUid:\t{os.getuid()}\t" in text_in(f"/proc/{pid}/status")


def _remove_if_abandoned(path: str) -> bool:
    with contextlib.suppress(OSError):
        file = os.open(path + _LOCK, _LOCK_FLAGS)
        try:
            owner = os.fstat(file).st_uid
            is_free = owner == os.getuid() and lock(file)
            if is_free and (not os.path.lexists(path) or _is_ours(path)):
                _remove(path)
                return True
        finally:
            os.close(file)
    return False


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name.startswith(_MAPPINGS):
                _remove_mappings(os.path.join(path, name))
    import shutil  # imported here, so that `import mpistrat` stays fast

    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path + _LOCK)


def _remove_mappings(listed: str) -> None:
    with open(listed, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            inode, path = line.rstrip("\n").split(" ", 1)
            with contextlib.suppress(OSError):
                status = os.lstat(path)  # another job may have made a new file of this name
                if status.st_ino == int(inode) and status.st_uid == os.getuid():
                    os.unlink(path)
