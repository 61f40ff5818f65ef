"""The files of one checkpoint: which there are, and what is in them.

state.json               the states that are the same on all ranks, by object; rank 0's
<object>.safetensors     their arrays
rank-00003.json          what is rank 3's own
rank-00003.safetensors
manifest.json            sizes and checksums of all these
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.lazy_mapping import LazyMapping
from mpistrat.checkpoint.manifest import read_manifest
from mpistrat.checkpoint.saving import Files
from mpistrat.checkpoint.state_tree import Encoder, decode
from mpistrat.checkpoint.tensor_file import Snapshot, parse

_STATE = "state.json"
_ARRAYS = ".safetensors"


def _of_rank(rank: int) -> str:
    return f"rank-{rank:05}"


class Snapshots:
    """Copies of states, in memory that is used again: pages of new memory cost more than the copy itself."""

    def __init__(self) -> None:
        self._kept: dict[str, Snapshot] = {}  # by file

    def forget(self) -> None:
        """Free the memory."""
        self._kept.clear()

    def common(self, states: Mapping[str, Any]) -> Files:
        """Args: states: those that are the same on all ranks, by object."""
        files: dict[str, Any] = {}
        trees = {name: self._encode(name, name, state, files) for name, state in states.items()}
        return {**files, _STATE: map(_json, [trees])}

    def of_rank(self, rank: int, states: Mapping[str, Any]) -> Files:
        """Args: states: this rank's own, by object."""
        files: dict[str, Any] = {}
        tree = self._encode(_of_rank(rank), "", states, files)
        return {**files, f"{_of_rank(rank)}.json": map(_json, [tree])}

    def _encode(self, file: str, name: str, state: Any, files: dict[str, Any]) -> Any:
        encoder = Encoder()
        try:
            tree = encoder.encode(state)
        except TypeError as error:
            raise TypeError(f"{name}: {error}" if name else str(error)) from None
        if encoder.arrays:
            snapshot = self._kept.get(file)
            if snapshot is None or not snapshot.retake(encoder.arrays):
                buffer = None if snapshot is None else snapshot.buffer
                snapshot = self._kept[file] = Snapshot(encoder.arrays, buffer)
            files[file + _ARRAYS] = [snapshot.header, snapshot.values]
        return tree


def _json(tree: Any) -> bytes:
    return json.dumps(tree, indent=1, allow_nan=False).encode()


class StoredCheckpoint:
    """A checkpoint that is read.

    Raises: ValueError, which names the file, for one that is damaged; OSError.
    Attributes: state: {"common": {name: state}, "ranks": {rank: {name: state}}}; ranks' states are read on demand. Of
        "common" all names are there, and the states that were wanted.
    """

    def __init__(self, path: str, wanted: Container[str]) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        trees = self._json(_STATE)
        states = {name: self._decode(name, tree) for name, tree in trees.items() if name in wanted}
        self.state: dict[str, Mapping[Any, Any]] = {
            "common": LazyMapping(trees, states.__getitem__),
            "ranks": LazyMapping(range(self.manifest.ranks), functools.cache(self._read_rank)),
        }

    def verify_ranks(self, rank: int, size: int) -> None:
        """What the ranks wrote of their own: rank `rank` of `size` looks at its share. Raises: ValueError."""
        for writer in range(rank, self.manifest.ranks, size):
            for name in self.manifest.files:
                if name.startswith(_of_rank(writer)):
                    self._read(name)

    def _read_rank(self, rank: int) -> Any:
        return self._decode(_of_rank(rank), self._json(f"{_of_rank(rank)}.json"))

    def _read(self, name: str) -> np.ndarray:
        if name not in self.manifest.files:
            raise ValueError(f"{self.path} has no {name}")
        return durable_files.read(os.path.join(self.path, name), *self.manifest.files[name])

    def _json(self, name: str) -> Any:
        return json.loads(self._read(name).tobytes())

    def _decode(self, file: str, tree: Any) -> Any:
        name = file + _ARRAYS
        return decode(tree, parse(self._read(name)) if name in self.manifest.files else {})
