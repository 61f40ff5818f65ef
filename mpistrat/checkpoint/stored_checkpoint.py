"""The files of one checkpoint: what is in them."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.lazy_mapping import LazyMapping
from mpistrat.checkpoint.manifest import ARRAYS, STATE, of_rank, parts_of, read_manifest
from mpistrat.checkpoint.saving import Files
from mpistrat.checkpoint.schema import check, parsed
from mpistrat.checkpoint.shards import check_parts, parts_of_rank, sharded_arrays
from mpistrat.checkpoint.state_tree import Encoder, decode
from mpistrat.checkpoint.tensor_file import Snapshot, parse


class Snapshots:
    """Copies of states, in memory that is used again: pages of new memory cost more than the copy itself."""

    def __init__(self) -> None:
        # By file.
        self._kept = collections.defaultdict[str, Snapshot](functools.partial(Snapshot, {}))

    def forget(self) -> None:
        """Free the memory."""
        self._kept.clear()

    def files(self, state: Mapping[str, Any], rank: int, writes_common: bool) -> Files:
        """Copies of all that a rank writes.

        Args:
            state: as of `Checkpoint.state_dict`.
            writes_common: also the states that are the same on all ranks.
        """
        common, files = state["common"], dict[str, Any]()
        trees = {of_rank(rank): {**state["ranks"][rank], **state["own"]}}
        if parts := parts_of_rank(common):
            trees[parts_of(rank)] = parts
        for name, tree in trees.items():
            files[f"{name}.json"] = map(_json, [self._encode(name, "", tree, files)])
        if writes_common:
            trees = {name: self._encode(name, name, tree, files) for name, tree in common.items()}
            files[STATE] = map(_json, [trees])
        return files

    def _encode(self, file: str, name: str, state: Any, files: dict[str, Any]) -> Any:
        encoder = Encoder()
        try:
            tree = encoder.encode(state)
        except TypeError as error:
            raise TypeError(f"{name}: {error}" if name else str(error)) from None
        if encoder.arrays:
            snapshot = self._kept[file]
            if not snapshot.retake(encoder.arrays):
                snapshot = self._kept[file] = Snapshot(encoder.arrays, snapshot.buffer)
            files[file + ARRAYS] = [snapshot.header, snapshot.values]
        return tree


def _json(tree: Any) -> bytes:
    return json.dumps(tree, indent=1, allow_nan=False).encode()


class StoredCheckpoint:
    """A checkpoint that is read.

    Args: objects: those of the program, by name, as of `Checkpoint.stateful_objects`.
    Raises: ValueError, which names the file, for one that is damaged; OSError.
    Attributes: state: {"common": {name: state}, "ranks": {rank: {name: state}}}; ranks' states are read on demand.
        "common" has all names; of `objects` it has the states.
    """

    def __init__(self, path: str, objects: Mapping[str, Any]) -> None:
        self.path, self._objects = path, objects
        self.manifest = read_manifest(path)
        trees = self._json(STATE)
        with self._damaged(STATE):
            check(trees, dict, "it")
        states = {}
        for name in filter(objects.__contains__, trees):
            states[name] = self._decode(STATE, name, trees[name])
            with self._damaged(STATE):
                check_state(name, objects[name], states[name], "state_schema")
        self._sharded = {name: sharded_arrays(state) for name, state in states.items()}
        self.state: dict[str, Mapping[Any, Any]] = {
            "common": {**dict.fromkeys(trees), **states},
            "ranks": LazyMapping(range(self.manifest.ranks), functools.cache(self._read_rank)),
        }

    def verify_ranks(self, rank: int, size: int) -> None:
        """What the ranks wrote of their own: rank `rank` of `size` looks at its share. Raises: ValueError."""
        for writer in range(rank, self.manifest.ranks, size):
            states = self._read_rank(writer)
            with self._damaged(f"{of_rank(writer)}.json"):
                for name in self._objects.keys() & states.keys():
                    check_state(name, self._objects[name], states[name], "rank_state_schema")
            self.parts(writer)

    def parts(self, rank: int) -> Any:
        """What a rank wrote of sharded tensors, by object and name; read at each call. Raises: ValueError."""
        if f"{parts_of(rank)}.json" not in self.manifest.files:
            return {}
        return self._checked(parts_of(rank), check_parts, self._sharded)

    def _read_rank(self, rank: int) -> Any:
        return self._checked(of_rank(rank), check, dict, "it")

    def _checked(self, stem: str, check_content: Callable[..., None], *args: Any) -> Any:
        """The content of a rank's file. Args: check_content: is called with it and `args`."""
        file = f"{stem}.json"
        content = self._decode(file, stem, self._json(file))
        with self._damaged(file):
            check_content(content, *args)
        return content

    @contextlib.contextmanager
    def _damaged(self, name: str) -> Iterator[None]:
        """Around what a file's content is made into: what is raised is that file's fault."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            path = os.path.join(self.path, name)
            raise ValueError(f"{path} is damaged: {kind}{error}") from None

    def _read(self, name: str) -> np.ndarray:
        return durable_files.read(os.path.join(self.path, name), *self.manifest.files[name])

    def _json(self, name: str) -> Any:
        durable_files.check_short(os.path.join(self.path, name), self.manifest.files[name][0])
        content = self._read(name).tobytes()
        with self._damaged(name):
            return parsed(content)

    def _decode(self, file: str, stem: str, tree: Any) -> Any:
        """The value of `tree`, of `file`, with the arrays of the file `stem`."""
        arrays = {}
        if (name := stem + ARRAYS) in self.manifest.files:
            content = self._read(name)
            with self._damaged(name):
                arrays = parse(content)
        with self._damaged(file):
            return decode(tree, arrays)


def check_state(name: str, value: Any, state: Any, method: str) -> None:
    """Raises: ValueError for a state that the object `value` would not have given, if it says what it gives."""
    schema = getattr(value, method, None)
    if schema is not None:
        check(state, dict, name)
        check(state, schema(state), name)
