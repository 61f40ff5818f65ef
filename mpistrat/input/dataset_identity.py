"""Compares the map-style datasets of the ranks, before the first epoch.

If ranks split, sort or number their data in different ways, they read some examples twice and others never, or learn
labels of different meanings.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch.utils.data as data

from mpistrat import arrays
from mpistrat.input.datasets import fetch
from mpistrat.input.random_state import RandomState

_Entries: TypeAlias = dict[str, str]

_MOST_ENTRIES = 1000  # of a sequence with an entry for each example
_MOST_PARTS = 16  # of an array or a list in an entry
_MOST_TEXTS = 100_000
_DEEPEST = 8  # datasets and lists in each other; a dataset may even hold itself
_MOST_BYTES = 1 << 22  # of a pickled dataset
_MOST_IN_A_COPY = 100_000  # examples of a pickled dataset
_ROUNDS = 7  # of loading again, because examples may be random
# Attributes that are compared even if they are shorter than the dataset.
_NAMES = (".classes", ".class_to_idx", ".files", ".samples", ".targets")


class _Pickled(bytearray):
    """The bytes of a pickled dataset. It raises ValueError if there are too many."""

    def write(self, part: Any) -> None:
        self.extend(part)
        if len(self) > _MOST_BYTES:
            raise ValueError


class _SmallPickler(pickle.Pickler):
    """Raises ValueError for a dataset that has a large array."""

    def reducer_override(self, value: Any) -> Any:
        if arrays.is_array(value) and value.nbytes > _MOST_BYTES:
            raise ValueError
        return NotImplemented


def entries_of(loader: data.DataLoader[Any], generators: RandomState) -> _Entries:
    """Return texts to compare, of some entries of the loader's dataset and of its first and last example.

    The examples are loaded from a copy, so the dataset opens no file. They are left out if they may be random, if no
    copy can be made, or if loading takes more than a second.

    Args: generators: the generators that loading may draw from. They do not change.
    Returns: the values by their names, such as "Subset.indices[0]".
    """
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    entries: _Entries = {}
    before = generators.capture()
    with contextlib.suppress(Exception):  # of the program's dataset
        length = len(dataset)
        _add_entries(name, dataset, length, entries)
        # Forks would share files that a copy may open.
        if loader.multiprocessing_context is None and length <= _MOST_IN_A_COPY:
            pickled = _Pickled()
            _SmallPickler(pickled, pickle.HIGHEST_PROTOCOL).dump(dataset)
            copy = pickle.loads(pickled)
            end = time.monotonic() + 1
            texts = _texts_of_examples(copy, length)
            for _ in range(_ROUNDS):
                if time.monotonic() > end or _texts_of_examples(copy, length) != texts:
                    break
            else:
                entries.update(texts)
    generators.put_back(before)
    return entries


def _texts_of_examples(dataset: Any, length: int) -> _Entries:
    """Return texts of the first and the last example; {} if they are equal, because they may be of this rank alone."""
    texts: _Entries = {}
    name = type(dataset).__name__
    for index in (0, length - 1):
        before = [*texts.values()]
        example = fetch(dataset, [index])[0]
        _add_entries(f"{name}[{index}]", example, 0, texts)
    if [*texts.values()] == before * 2:
        return {}
    return texts


def check_alike(of_ranks: Sequence[_Entries]) -> None:
    """Compare the entries of all ranks. A rank may lack an entry.

    Raises: ValueError if an entry differs.
    """
    for name, entry in of_ranks[0].items():
        for rank, entries in enumerate(of_ranks):
            other = entries.get(name, entry)
            if other != entry:
                raise ValueError(
                    f"the datasets of the ranks differ: {name} is {entry:.99} on rank 0, and {other:.99} on rank "
                    f"{rank}. Give all ranks the same: seed random_split and other draws, sort files and class names "
                    "(sets have other orders in other processes); or, for rows of each rank, use "
                    "strategy.prepare(loader, local_batches=True) or strategy.shard"
                )


def _add_entries(name: str, value: Any, length: int, entries: _Entries) -> None:
    """Add texts to `entries` for the parts of `value` with an entry for each example.

    Args: length: the number of examples in the dataset with this value; 0 if it is an example, or an entry of one.
    """
    if len(entries) > _MOST_TEXTS or name.count(".") > _DEEPEST:
        return
    if isinstance(value, (str, int, float, os.PathLike)):
        if not length:
            entries[name] = _text_of(value)
        return
    value = _as_list(value, length)
    if _is_sequence(value) and (len(value) >= length or name.endswith(_NAMES)):
        most = _MOST_ENTRIES if length else _MOST_PARTS
        step = len(value) // most + 1
        for i, part in enumerate(value[::step]):
            _add_entries(f"{name}[{i * step}]", part, 0, entries)
    elif isinstance(value, (list, tuple, data.Dataset)):
        is_dataset = isinstance(value, data.Dataset)
        parts = vars(value).items() if is_dataset else enumerate(value[:_MOST_PARTS])
        for key, part in parts:
            with contextlib.suppress(Exception):  # of an array of another kind
                _add_entries(f"{name}.{key}", part, length, entries)


def _is_sequence(value: Any) -> bool:
    is_array = arrays.is_array(value) and not isinstance(value, np.memmap)
    return is_array or isinstance(value, (list, tuple))


def _text_of(value: str | float | os.PathLike[str]) -> str:
    """Return a text to compare.

    A path counts without its folders, because each node may keep its files elsewhere. Of a float one digit counts,
    because processors compute different last digits.
    """
    if isinstance(value, float):
        return f"{value:.0e}"
    return os.path.basename(str(value))


def _as_list(value: Any, length: int) -> Any:
    """Return the sorted items of a small dict, some elements of an array in an entry, and any other value itself."""
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return sorted(value.items())
    if arrays.is_array(value) and not length:
        flat = arrays.to_numpy(value).reshape(-1)
        return flat[:: len(flat) // _MOST_PARTS + 1].tolist()
    return value
