"""Reads and checks the files of one checkpoint."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.lazy_mapping import LazyMapping
from mpistrat.checkpoint.manifest import (
    ARRAYS,
    CLASSES,
    STATE,
    read_manifest,
    stem_of_parts,
    stem_of_rank,
)
from mpistrat.checkpoint.schema import check, parsed
from mpistrat.checkpoint.shards import check_parts, sharded_arrays
from mpistrat.checkpoint.state_tree import decode
from mpistrat.checkpoint.tensor_file import parse


class StoredCheckpoint:
    """A complete checkpoint on disk, checked as it is read. A rank's states are read at their first look-up.

    Args:
        path: the checkpoint's folder.
        objects: the program's objects by name, as `Checkpoint.stateful_objects` returns them.
    Attributes:
        state: {"common": {name: state}, "ranks": {rank: {name: state}}, "classes": {name: class}}, as
            `Checkpoint.load_state_dict` takes it, with a `ShardedArray` for each sharded tensor. "common" has the names
            of all saved objects, but only the states of `objects`; other states are None. A rank's state includes its
            local states.
        manifest: the checkpoint's `Manifest`.
    Raises: ValueError for a damaged checkpoint, with the name of the file; OSError.
    """

    def __init__(self, path: str, objects: Mapping[str, Any]) -> None:
        self.path = path
        self._objects = objects
        self.manifest = read_manifest(path)
        trees = self._json(STATE)
        with self._damaged(STATE):
            check(trees, dict, "it")
            classes = trees.pop(CLASSES, {})  # earlier versions saved none
            check(classes, {str: str}, CLASSES)
        states = {}
        for name in sorted(objects.keys() & trees.keys()):
            states[name] = self._decode(STATE, name, trees[name])
            with self._damaged(STATE):
                check_state(name, objects[name], states[name], "state_schema")
        self._sharded = {name: sharded_arrays(state) for name, state in states.items()}
        self.state: dict[str, Mapping[Any, Any]] = {
            "common": {**dict.fromkeys(trees), **states},
            "ranks": LazyMapping(range(self.manifest.ranks), functools.cache(self._read_rank)),
            "classes": classes,
        }

    def verify_ranks(self, rank: int, size: int) -> None:
        """Check this rank's share of the rank files: the files of the savers `rank`, `rank + size` and so on.

        Args:
            rank: this rank.
            size: number of ranks that restore, and share the work.
        Raises: ValueError if a file is damaged; OSError.
        """
        for writer in range(rank, self.manifest.ranks, size):
            states = self._read_rank(writer)
            with self._damaged(f"{stem_of_rank(writer)}.json"):
                for name in self._objects.keys() & states.keys():
                    check_state(name, self._objects[name], states[name], "rank_state_schema")
            self.parts(writer)

    def parts(self, rank: int) -> Any:
        """Read the parts of sharded tensors that a rank wrote. Each call reads the file again.

        Returns: {object: {name: {"offset": list, "values": tensor}}}; empty if the rank wrote none.
        Raises: ValueError if the file is damaged; OSError.
        """
        if f"{stem_of_parts(rank)}.json" not in self.manifest.files:
            return {}
        return self._checked(stem_of_parts(rank), check_parts, self._sharded)

    def _read_rank(self, rank: int) -> Any:
        return self._checked(stem_of_rank(rank), check, dict, "it")

    def _checked(self, stem: str, check_content: Callable[..., None], *args: Any) -> Any:
        """Return the content of the files `stem` of a rank, after `check_content(content, *args)` has accepted it.

        Raises: ValueError if a file is damaged, or if `check_content` raises any error; OSError.
        """
        file = f"{stem}.json"
        content = self._decode(file, stem, self._json(file))
        with self._damaged(file):
            check_content(content, *args)
        return content

    @contextlib.contextmanager
    def _damaged(self, name: str) -> Iterator[None]:
        """A context that raises any error of its block as a ValueError: the file `name` is damaged."""
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            path = os.path.join(self.path, name)
            raise ValueError(f"{path} is damaged: {kind}{error}") from None

    def _read(self, name: str) -> np.ndarray:
        size, checksum = self.manifest.files[name]
        return durable_files.read(os.path.join(self.path, name), size, checksum)

    def _json(self, name: str) -> Any:
        size, _ = self.manifest.files[name]
        durable_files.check_short(os.path.join(self.path, name), size)
        content = self._read(name).tobytes()
        with self._damaged(name):
            return parsed(content)

    def _decode(self, file: str, stem: str, tree: Any) -> Any:
        """Return the value of `tree`, JSON data from `file`, with its arrays from `stem`.safetensors, if that exists.

        Raises: ValueError if a file is damaged; OSError.
        """
        arrays = {}
        if (name := stem + ARRAYS) in self.manifest.files:
            content = self._read(name)
            with self._damaged(name):
                arrays = parse(content)
        with self._damaged(file):
            return decode(tree, arrays)


def check_state(name: str, value: Any, state: Any, method: str) -> None:
    """Raise ValueError if `state` is no dict that fits the schema of the object `value`.

    Args:
        name: name of the object, for the message.
        method: name of the method of `value` that returns the schema. Without the method nothing is checked.
    """
    schema = getattr(value, method, None)
    if schema is not None:
        check(state, dict, name)
        check(state, schema(state), name)
