"""Reads and writes files and folders that survive a crash once they are written, and that no other user can read."""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np

from mpistrat.checkpoint.failures import free_bytes, naming
from mpistrat.checkpoint.schema import MOST_BYTES_OF_JSON
from mpistrat.machine.control_groups import most_memory

_SURELY_THERE = 1 << 26
_BYTES_PER_WRITE = 1 << 24
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Opening follows no link, and does not wait at a pipe.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def write(path: str, chunks: Iterable[bytes | np.ndarray]) -> tuple[int, int]:
    """Make the file `path` from `chunks`, and wait until it is on disk. Returns: its bytes, and their CRC-32.

    Raises: ValueError for a .json file that is too long to be read again; OSError, also if `path` exists.
    """
    # Before Python 3.12 the types do not know that an array is a buffer, too.
    views = [memoryview(cast("bytes", chunk)) for chunk in chunks]
    total = sum(len(view) for view in views)
    if path.endswith(".json") and total > MOST_BYTES_OF_JSON:
        raise ValueError(
            f"{path} would have {total} bytes, more than the {MOST_BYTES_OF_JSON} that are read: long lists in a "
            "state_dict() must be arrays"
        )
    size = checksum = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with naming(path, lambda: f"{size} of {total} bytes are written, {free_bytes(path)}"):
        file = os.open(path, flags, 0o600)
        try:
            os.fchmod(file, 0o600)  # whatever the umask
            for rest in views:
                while rest:
                    piece = rest[:_BYTES_PER_WRITE]
                    written = os.write(file, piece)
                    checksum = zlib.crc32(piece[:written], checksum)
                    size += written
                    rest = rest[written:]
            os.fsync(file)
        finally:
            os.close(file)
    return size, checksum


def read(path: str, size: int, checksum: int) -> np.ndarray:
    """Return a file's bytes, uint8[size]. Raises: ValueError if the size or the CRC-32 differs; OSError."""
    with _opened(path, f"0 of {size} bytes are read") as (file, found):
        check_size(path, found, size)
        content = _filled(path, file, size)
    if len(content) < size or zlib.crc32(content.data) != checksum:
        raise ValueError(f"{path} is damaged: its checksum is not the one that was written")
    return content


def read_text(path: str) -> bytes:
    """Return the bytes of a short file. Raises: ValueError if it is too long, or no regular file; OSError."""
    with _opened(path, "nothing is read") as (file, size):
        check_short(path, size)
        return _filled(path, file, size).tobytes()


def check_regular(path: str, size: int) -> None:
    """Check a file without reading it. Raises: ValueError if it is no regular file of `size` bytes; OSError."""
    status = os.lstat(path)
    _check_kind(path, status)
    check_size(path, status.st_size, size)


def check_short(path: str, size: int) -> None:
    if size > MOST_BYTES_OF_JSON:
        raise ValueError(
            f"{path} has {size} bytes, more than the {MOST_BYTES_OF_JSON} of JSON that are read"
        )


def check_size(path: str, found: int, size: int) -> None:
    if found != size:
        raise ValueError(f"{path} is damaged: it has {found} bytes, and was written with {size}")


@contextlib.contextmanager
def _opened(path: str, so_far: str) -> Iterator[tuple[int, int]]:
    """Open a regular file for the block, and yield (descriptor, size in bytes).

    Args:
        so_far: the progress, for the text of an OSError: "0 of 12 bytes are read".
    Raises: ValueError if `path` is a folder, a link or another kind of file; OSError.
    """
    with naming(path, lambda: so_far):
        try:
            file = os.open(path, _READ)
        except OSError:
            _check_kind(path, os.lstat(path))  # raises an error that names the kind of file
            raise
    try:
        status = os.fstat(file)
        _check_kind(path, status)
        yield file, status.st_size
    finally:
        os.close(file)


def _check_kind(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{path} is damaged: it is {_KINDS[stat.S_IFMT(status.st_mode)]}, and no file"
        )


_KINDS = {
    **{stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"},
    **{stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"},
}


def _filled(path: str, file: int, size: int) -> np.ndarray:
    """Return the first `size` bytes of the open `file`, uint8[n]; fewer if the file ends early.

    Raises: ValueError if the machine has no memory for `size` bytes; OSError, with `path`.
    """
    # `most_memory` includes memory that other processes use now, because a refusal here would make the job restore an
    # older checkpoint.
    most = most_memory() if size > _SURELY_THERE else size
    if size > most:
        raise ValueError(f"{path} has {size} bytes, and this machine has memory for {most:.0f}")
    try:
        content = np.empty(size, np.uint8)
    except MemoryError:
        raise ValueError(f"{path} has {size} bytes, and there is no memory for as many") from None
    begin = 0
    with naming(path, lambda: f"{begin} of {size} bytes are read"):
        while count := os.readv(file, [content.data[begin:]]):
            begin += count
    return content[:begin]


def make_folder(path: str) -> None:
    with naming(path, lambda: free_bytes(path)):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask


def make_folders(path: str) -> None:
    """Make the missing folders of `path`, and wait until the disk has their names."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_folders(parent)
    with contextlib.suppress(FileExistsError):
        make_folder(path)
        sync_folder(parent)


def sync_folder(path: str) -> None:
    """Wait until the disk has the names in a folder."""
    with naming(path, lambda: free_bytes(path)):
        folder = os.open(path, _FOLDER)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def rename(path: str, new: str) -> None:
    """Give a folder a new name in the same parent, and wait until the disk has the name."""
    os.rename(path, new)
    sync_folder(os.path.dirname(new))
