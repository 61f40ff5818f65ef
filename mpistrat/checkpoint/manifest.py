"""The files of a complete checkpoint. The manifest is written last.

state.json                    the states that are equal on all ranks, by object, and the objects' classes; rank 0 writes
                              it
<object>.safetensors          the arrays of an object's state
rank-00003.json               rank 3's own states
rank-00003.safetensors        the arrays of rank 3's own states
rank-00003-parts.json         the places of rank 3's parts in sharded tensors
rank-00003-parts.safetensors  the values of rank 3's parts
manifest.json                 sizes and checksums of all other files
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.schema import COUNT, check, parsed

NAME = "manifest.json"
STATE = "state.json"
CLASSES = "classes of objects"  # a name in state.json; no object has it, because objects' names are identifiers
ARRAYS = ".safetensors"
_FORMAT = "mpistrat checkpoint 1"
_FILES = {str: [COUNT]}
_SCHEMA = {"step": COUNT, "number": COUNT, "ranks": COUNT, "files": _FILES}


def stem_of_rank(rank: int) -> str:
    """Return the name of the files with a rank's own states, without the suffix: "rank-00003"."""
    return f"rank-{rank:05}"


def stem_of_parts(rank: int) -> str:
    """Return the name of the files with a rank's parts of sharded tensors, without the suffix: "rank-00003-parts".

    The files do not exist if the rank saves no parts.
    """
    return f"{stem_of_rank(rank)}-parts"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`. A folder with this file and all files in its list is a complete checkpoint.

    Attributes:
        step: the program's step number.
        number: number of the save among all saves in the directory; the newest checkpoint has the highest.
        ranks: number of ranks that wrote the checkpoint.
        files: (bytes, CRC-32) of each file but the manifest, by name.
    """

    step: int
    number: int
    ranks: int
    files: Mapping[str, tuple[int, int]]

    def write(self, folder: str) -> None:
        path = os.path.join(folder, NAME)
        content = dataclasses.asdict(self)
        durable_files.write(path, [sealed(content)])


def sealed(content: object) -> bytes:
    """Return the bytes of a JSON text with `content`, the format's name, and the CRC-32 of `content`."""
    text = json.dumps(content, indent=1, sort_keys=True)
    checksum = zlib.crc32(text.encode())
    return f'{{"format": "{_FORMAT}", "crc32": {checksum}, "content":\n{text}}}'.encode()


def unsealed(text: bytes, path: str) -> Any:
    """Return the content that `sealed` has made into `text`, the bytes of the file `path`.

    Raises: ValueError if any byte differs from the written bytes.
    """
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
        raise ValueError(f"{path} is damaged: its checksum is not the one that was written")
    return outer["content"]


def files_of(content: Any) -> dict[str, tuple[int, int]]:
    """Return (bytes, CRC-32) of files by name, from the `files` of a manifest or a note.

    Raises: ValueError if `content` is anything else.
    """
    check(content, _FILES, "files")
    files: dict[str, tuple[int, int]] = {}
    for name, entry in content.items():
        if len(entry) != 2 or entry[1] >> 32:
            raise ValueError(
                f"files.{name!r:.80} is {entry!r:.80}, not a number of bytes and a CRC-32"
            )
        size, checksum = entry
        files[name] = (size, checksum)
    return files


def read_manifest(folder: str) -> Manifest:
    """Return the manifest of the checkpoint in `folder`. All its files must exist in their sizes, but are not read.

    Raises: ValueError if the manifest is damaged, or a file has another size; OSError, such as FileNotFoundError.
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
    """Raise ValueError unless `files` has all files that a checkpoint of `ranks` ranks needs, and no unknown names."""
    if not 0 < ranks < len(files):
        raise ValueError(f"{len(files)} files cannot be the files of {ranks} ranks")
    needed = {STATE}
    known = {STATE}
    for rank in range(ranks):
        states = stem_of_rank(rank)
        parts = stem_of_parts(rank)
        needed.add(f"{states}.json")
        known |= {f"{states}.json", states + ARRAYS}
        known |= {f"{parts}.json", parts + ARRAYS}
    missing = needed - files.keys()
    if missing:
        raise ValueError(f"{min(missing)} is not listed, though {ranks} ranks saved")
    for name in files.keys() - known:
        stem, suffix = os.path.splitext(name)
        if suffix != ARRAYS or not stem.isidentifier():
            raise ValueError(f"{name!r:.80} is no file of a checkpoint")
