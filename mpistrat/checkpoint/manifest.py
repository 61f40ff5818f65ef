"""The files of a complete checkpoint. Its manifest is written last.

state.json               the states that are the same on all ranks, by object; rank 0's
<object>.safetensors     their arrays
rank-00003.json          rank 3's own states
rank-00003.safetensors
rank-00003-parts.json    where in sharded tensors rank 3's parts are
rank-00003-parts.safetensors
manifest.json            sizes and checksums of all these
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.schema import COUNT, check, parsed

NAME = "manifest.json"
STATE = "state.json"
ARRAYS = ".safetensors"
_FORMAT = "mpistrat checkpoint 1"
_FILES = {str: [COUNT]}
_SCHEMA = {"step": COUNT, "number": COUNT, "ranks": COUNT, "files": _FILES}


def stem_of_rank(rank: int) -> str:
    """The name of a rank's files without the suffix."""
    return f"rank-{rank:05}"


def stem_of_parts(rank: int) -> str:
    """The name, without the suffix, of the files of a rank's parts of sharded tensors; a rank may have none."""
    return f"{stem_of_rank(rank)}-parts"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`: a folder with it, and with all files in it, is a complete checkpoint.

    Attributes:
        step: the program's number.
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


def unsealed(text: bytes, path: str) -> Any:
    """Raises: ValueError when `text`, of the file `path`, is not what was written, to the byte."""
    try:
        outer = parsed(text)
        check(outer, {"format": str, "content": lambda content: None}, "it")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not complete JSON ({error})") from None
    if outer["format"] != _FORMAT:
        raise ValueError(f"{path} is a {outer['format']!r:.40}; this version reads {_FORMAT!r}")
    is_whole = False
    with contextlib.suppress(RecursionError):
        is_whole = sealed(outer["content"]) == text
    if not is_whole:
        raise ValueError(f"{path} is damaged: its checksum is not that of what was written")
    return outer["content"]


def files_of(content: Any) -> dict[str, tuple[int, int]]:
    """(bytes, CRC-32) by name, from JSON. Raises: ValueError for anything else."""
    check(content, _FILES, "files")
    for name, entry in content.items():
        if len(entry) != 2 or entry[1] >> 32:
            raise ValueError(
                f"files.{name!r:.80} is {entry!r:.80}, not a number of bytes and a CRC-32"
            )
    return {name: (size, checksum) for name, (size, checksum) in content.items()}


def read_manifest(folder: str) -> Manifest:
    """The manifest of a checkpoint. All of its files are there, in their sizes.

    Raises: ValueError for a checkpoint that is not whole; OSError.
    """
    path = os.path.join(folder, NAME)
    content = unsealed(durable_files.read_text(path), path)
    try:
        check(content, _SCHEMA, "it")
        files = files_of(content["files"])
        _check_names(files, content["ranks"])
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for name, (size, _) in files.items():
        durable_files.check_regular(os.path.join(folder, name), size)
    return Manifest(content["step"], content["number"], content["ranks"], files)


def _check_names(files: Mapping[str, Any], ranks: int) -> None:
    """Raises: ValueError unless a checkpoint of so many ranks has files of these names, and all that it needs."""
    if not 0 < ranks < len(files):
        raise ValueError(f"{len(files)} files are not those of {ranks} ranks")
    needed = {STATE, *(f"{stem_of_rank(rank)}.json" for rank in range(ranks))}
    missing = needed - files.keys()
    if missing:
        raise ValueError(f"of {ranks} ranks there is no {min(missing)}")
    stems = {stem(rank) for rank in range(ranks) for stem in (stem_of_rank, stem_of_parts)}
    known = itertools.product(stems, (".json", ARRAYS))
    for name in files.keys() - {STATE, *map("".join, known)}:
        stem, suffix = os.path.splitext(name)
        if suffix != ARRAYS or not stem.isidentifier():
            raise ValueError(f"{name!r:.80} is no file of a checkpoint")
