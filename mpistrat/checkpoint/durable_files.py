"""Files and folders that survive a crash once they are written, and that no other user can read."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable

import numpy as np

_BYTES_PER_WRITE = 1 << 24
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def write(path: str, parts: Iterable[bytes | np.ndarray]) -> tuple[int, int]:
    """Make the file `path` of `parts` and wait until the disk has it. Returns: its bytes, and their CRC-32."""
    size = checksum = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)  # whatever the umask
        for part in parts:
            rest = memoryview(part)  # type: ignore[arg-type]
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
    """The bytes of a file, uint8[size]. Raises: ValueError when they are not those that were written; OSError."""
    content = np.empty(size, np.uint8)
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise ValueError(
                f"{path} is damaged: it has {found} bytes, and was written with {size}"
            )
        rest = content.data
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
    if rest or zlib.crc32(content.data) != checksum:
        raise ValueError(f"{path} is damaged: its checksum is not that of what was written")
    return content


def make_folder(path: str) -> None:
    os.mkdir(path, 0o700)
    os.chmod(path, 0o700)  # whatever the umask


def make_folders(path: str) -> None:
    """Make the folder and those above it, as far as they are missing, and wait until the disk has their names."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_folders(parent)
    with contextlib.suppress(FileExistsError):
        make_folder(path)
        sync_folder(parent)


def sync_folder(path: str) -> None:
    """Wait until the disk has the names in a folder."""
    folder = os.open(path, _FOLDER)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def rename(path: str, new: str) -> None:
    """Give a folder another name beside, and wait until the disk has it."""
    os.rename(path, new)
    sync_folder(os.path.dirname(new))
