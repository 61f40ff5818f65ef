"""Makes the files that a rank writes for a checkpoint, from copies of the states."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mpistrat.checkpoint.manifest import ARRAYS, CLASSES, STATE, stem_of_parts, stem_of_rank
from mpistrat.checkpoint.saving import Files
from mpistrat.checkpoint.shards import parts_to_save
from mpistrat.checkpoint.state_tree import Encoder
from mpistrat.checkpoint.tensor_file import Snapshot

_EMPTY = Snapshot({})


class Snapshots:
    """Copies of a rank's states for the thread that writes them.

    Each save uses the memory of the previous save, because new pages of memory cost more than the copy itself.
    """

    def __init__(self) -> None:
        # The copies of arrays, by their file's name without the suffix.
        self._kept: dict[str, Snapshot] = {}

    def forget(self) -> None:
        """Free the memory of the copies."""
        self._kept.clear()

    def files(self, state: Mapping[str, Any], rank: int) -> Files:
        """Return the files that `rank` writes, by name, from copies of the states. The next call overwrites the copies.

        Each rank writes its own states, and its parts of sharded tensors. Rank 0 also writes the states that are equal
        on all ranks.

        Args:
            state: the states, as `Checkpoint.state_dict` returns them.
        Raises: TypeError for a value that a checkpoint cannot keep.
        """
        common = state["common"]
        files: dict[str, Any] = {}
        own = {**state["ranks"][rank], **state["local"]}
        trees = {stem_of_rank(rank): own}
        parts = parts_to_save(common)
        if parts:
            trees[stem_of_parts(rank)] = parts
        for name, tree in trees.items():
            files[f"{name}.json"] = _json(self._encode(name, "", tree, files))
        if rank == 0:
            content = {}
            for name, tree in common.items():
                content[name] = self._encode(name, name, tree, files)
            content[CLASSES] = state["classes"]
            files[STATE] = _json(content)
        return files

    def _encode(self, file: str, name: str, state: Any, files: dict[str, Any]) -> Any:
        """Return `state` as JSON data. If it has arrays, copy them, and add the copies to `files`.

        Args:
            file: name of the file of the arrays, without the suffix.
            name: name of the object, for the message; "" for the states of a rank.
        Raises: TypeError for a value that a checkpoint cannot keep.
        """
        encoder = Encoder()
        try:
            tree = encoder.encode(state)
        except TypeError as error:
            text = str(error)
            if name:
                text = f"{name}: {text}"
            raise TypeError(text) from None
        if encoder.arrays:
            snapshot = self._kept.get(file, _EMPTY)
            if not snapshot.retake(encoder.arrays):
                snapshot = self._kept[file] = Snapshot(encoder.arrays, snapshot.buffer)
            files[file + ARRAYS] = [snapshot.header, snapshot.values]
        return tree


def _json(tree: Any) -> Iterator[bytes]:
    """Yield the text of `tree`, on the thread that writes it."""
    yield json.dumps(tree, indent=1, allow_nan=False).encode()
