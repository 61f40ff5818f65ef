"""What a complete checkpoint says of itself; written last."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping

from mpistrat.checkpoint import durable_files

NAME = "manifest.json"
_FORMAT = "mpistrat checkpoint 1"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """
    Attributes:
        step: which the program gave.
        number: of the save, among all in the directory: the newest has the highest.
        ranks: how many ranks wrote it.
        files: (bytes, CRC-32) of each file but this one, by its name.
    """

    step: int
    number: int
    ranks: int
    files: Mapping[str, tuple[int, int]]

    def write(self, folder: str) -> None:
        durable_files.write(os.path.join(folder, NAME), [sealed(dataclasses.asdict(self))])


def sealed(content: object) -> bytes:
    """JSON that tells its own checksum."""
    text = json.dumps(content, indent=1, sort_keys=True)
    checksum = zlib.crc32(text.encode())
    return f'{{"format": "{_FORMAT}", "crc32": {checksum}, "content":\n{text}}}'.encode()


def unsealed(text: bytes, path: str) -> object:
    """Raises: ValueError when `text`, of the file `path`, is not what was written, to the byte."""
    try:
        outer = json.loads(text)
        content, written_as = outer["content"], outer["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: it is not complete JSON") from None
    if written_as == _FORMAT and sealed(content) == text:
        return content
    raise ValueError(
        f"{path} is damaged: its checksum is not that of what was written"
        if written_as == _FORMAT
        else f"{path} is a {written_as!r:.40}; this version reads {_FORMAT!r}"
    )


def read_manifest(folder: str) -> Manifest:
    """That of a checkpoint all of whose files are there, in their sizes.

    Raises: ValueError for a checkpoint that is not whole; OSError.
    """
    path = os.path.join(folder, NAME)
    with open(path, "rb") as file:
        content = unsealed(file.read(), path)
    assert isinstance(content, dict)
    content["files"] = {name: (size, crc) for name, (size, crc) in content["files"].items()}
    manifest = Manifest(**content)
    for name, (size, _) in manifest.files.items():
        found = os.stat(os.path.join(folder, name)).st_size
        if found != size:
            raise ValueError(
                f"{os.path.join(folder, name)} is damaged: it has {found} bytes, and was written with {size}"
            )
    return manifest
