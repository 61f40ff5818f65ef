"""Batches are nested structures of arrays and of lists. The first dimension of each array counts the examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.input.batch_structure import (
    is_list,
    lists_of_examples,
    rows_of,
)
from mpistrat.input.element_spec import ArraySpec
from mpistrat.values import DistributedValues


class Batches:
    """Measures, cuts and joins batches. It implements `splitting.Kind`."""

    def size(self, batch: Any) -> int:
        """Return the number of examples in `batch`.

        Raises: ValueError if a leaf is neither None, nor an array with dimensions, nor a list of examples; if the
            leaves have different numbers of examples; or if that number cannot be told.
        """
        sizes: set[Any] = set()
        lists = []

        def is_inner_list(part: Any) -> bool:
            return part is not batch and is_list(part)

        for leaf in nest.flatten(batch, is_inner_list):
            rows = rows_of(leaf)
            if is_list(leaf):
                lists.append(leaf)
            elif rows is not None:
                sizes.add(rows)
            elif leaf is not None:
                raise ValueError(
                    "a dataset must yield batches of arrays whose first dimension is the batch; call batch first. "
                    f"Got {leaf!r:.60}"
                )
        sizes = sizes or _sizes_of(lists)
        readings = {_readings(part, size) for size in sizes for part in lists if part}
        if len(sizes) != 1 or readings - {1}:
            raise ValueError(
                f"all parts of a batch must have the same first dimension, the GLOBAL batch size; got {sorted(sizes)}. "
                "A list may have arrays of all examples, or an item for each example, if only one is possible. Put "
                "arrays of all examples in a dict; or give a map-style DataLoader, which is not cut"
            )
        return int(sizes.pop())

    def cut(self, batch: Any, part: slice) -> Any:
        def piece(leaf: Any) -> Any:
            if nest.is_structure(leaf):
                return nest.rebuild(leaf, list(leaf)[part])
            return None if leaf is None else leaf[part]

        return nest.map_structure(piece, batch, lists_of_examples(batch, self.size(batch)))

    def join(self, parts: list[Any]) -> Any:
        apart = []
        for part in parts:
            is_leaf = lists_of_examples(part, self.size(part))
            apart.append(nest.take_apart(part, is_leaf))
        return _combined(_joined, apart)


def _joined(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if nest.is_structure(first):
        return nest.rebuild(first, [item for leaf in leaves for item in leaf])
    return None if first is None else arrays.concatenate(leaves)


def _sizes_of(lists: list[Any]) -> set[Any]:
    """Return the numbers of examples that a batch of `lists` alone may have."""
    lengths = {len(part) for part in lists}
    rows = {rows_of(leaf) for leaf in nest.flatten(lists)}
    known = (lengths | rows) - {None}
    return {size for size in known if 0 not in [_readings(part, size) for part in lists]}


def _readings(part: Any, count: int | None) -> int:
    """Return in how many ways the list `part` may be read in a batch of `count` examples.

    It may have an item for each example, or arrays of all examples.
    """
    if {rows_of(leaf) for leaf in nest.flatten(part)} == {count}:
        return 1 + (len(part) == count)
    return int(lists_of_examples(None, count)(part))


def collate(examples: list[Any]) -> Any:
    """Make one batch of several examples: stack torch tensors as tensors, and everything else as NumPy arrays.

    Raises: ValueError if the examples differ in structure, or arrays in shape; RuntimeError if torch tensors differ in
        shape.
    """
    return _combined(_stack, [nest.take_apart(example) for example in examples])


def _combined(fn: Callable[[tuple[Any, ...]], Any], apart: list[Any]) -> Any:
    """Return a structure with `fn(leaves)` in place of each leaf; `leaves` has this leaf of every structure.

    Args: apart: `nest.take_apart` of each structure.
    Raises: ValueError if the structures differ.
    """
    leaves, shapes, arrange = zip(*apart, strict=True)
    different = sorted({*shapes})
    if len(different) > 1:
        raise ValueError(
            f"the dataset changes its structure: elements must be alike, got {' and '.join(different[:2])}"
        )
    return arrange[0]([fn(column) for column in zip(*leaves, strict=True)])


def _stack(column: tuple[Any, ...]) -> Any:
    if arrays.is_torch(column[0]):
        import torch

        return torch.stack(column)
    values = [np.asarray(arrays.unmasked(value)) for value in column]
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise ValueError(
            f"the examples of a batch must have the same shape, got {sorted(shapes)[:4]}; pad them, or give "
            "collate_fn"
        )
    return np.stack(values)


def without_examples(batch: Any, count: int | None = None) -> Any:
    """Return a batch of no examples: arrays in `batch` cut to length 0 along their first dimension, and empty lists.

    Numbers, None and arrays without dimensions stay as they are. `batch` is not changed.

    Args: count: number of examples in `batch`; None if only `batch` itself may tell.
    Raises: ValueError if a leaf cannot be made empty, for example a text.
    """
    if count is None:
        with contextlib.suppress(ValueError):
            count = Batches().size(batch)
    return nest.map_structure(_without_examples, batch, lists_of_examples(batch, count))


def _without_examples(leaf: Any) -> Any:
    if nest.is_structure(leaf):
        return nest.rebuild(leaf, [])
    if rows_of(leaf) is not None:
        with contextlib.suppress(RuntimeError):  # of a nested or sparse tensor
            return leaf[:0]
    elif arrays.is_array(leaf) or arrays.is_number(leaf) or leaf is None:
        return leaf
    raise ValueError(
        "a step leaves a replica without examples, and its batch cannot be made a batch of no examples: it has "
        f"{leaf!r:.60}. Let collate_fn give arrays (np.array of texts), or leave short batches out: drop_last=True, "
        "with a global batch that divides by the number of replicas"
    )


def spec_of(batch: Any) -> Any:
    """Return the structure of `batch`, with an `ArraySpec` in place of each leaf; dtype "object" if it is no array."""

    def spec(leaf: Any) -> ArraySpec:
        if not arrays.is_array(leaf):
            if not isinstance(leaf, (str, bytes, int, float, complex)):
                leaf = None
            leaf = np.asarray(leaf)
        return ArraySpec.of(leaf)

    try:
        return nest.map_structure(spec, batch)
    except Exception:  # a structure of the program's class takes no specs
        return spec(None)


def explain_empty_batch(error: Exception, arguments: Any) -> None:
    """Add a hint about `drop_last=True` to the text of `error`, if an array in `arguments` has no examples.

    Called by: `Strategy.run`, if a function raises `error` and there are several replicas. It raises `error` again.
    Args: arguments: the function's arguments, a nest; each component of a distributed value is looked at.
    """
    rows: list[int | None] = []
    for leaf in nest.flatten(arguments):
        values = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        rows += [rows_of(value) for value in values]
    if 0 not in rows:
        return
    note = (
        "An argument is an array of no examples. If the last global batch is short, and leaves a replica without "
        "examples, leave short batches out: drop_last=True, with a global batch that divides by the number of replicas"
    )
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    elif len(error.args) == 1:
        error.args = (f"{error}\n{note}",)
