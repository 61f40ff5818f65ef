"""Batches are nested structures of arrays. The first dimension of each array counts the examples."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.input.element_spec import ArraySpec
from mpistrat.values import DistributedValues


class Batches:
    """Measures, cuts and joins batches of arrays. It implements `splitting.Kind`."""

    def size(self, batch: Any) -> int:
        """Return the number of examples in `batch`.

        Raises: ValueError if a leaf is not an array or has no dimension, or if the leaves' first dimensions differ.
        """
        sizes = {_first_dimension(leaf) for leaf in nest.flatten(batch)}
        if len(sizes) != 1:
            raise ValueError(
                "all parts of a batch must have the same first dimension, the GLOBAL batch size; got "
                f"{sorted(sizes)}"
            )
        return sizes.pop()

    def cut(self, batch: Any, part: slice) -> Any:
        return nest.map_structure(operator.itemgetter(part), batch)

    def join(self, parts: list[Any]) -> Any:
        return nest.pack_like(parts[0], [arrays.concatenate(column) for column in _columns(parts)])


def _first_dimension(leaf: Any) -> int:
    if not arrays.is_array(leaf) or leaf.ndim == 0:
        raise ValueError(
            "a dataset must yield batches of arrays whose first dimension is the batch; call batch first. "
            f"Got {leaf!r:.60}"
        )
    return int(leaf.shape[0])


def collate(examples: list[Any]) -> Any:
    """Make one batch of several examples: stack torch tensors as tensors, and everything else as NumPy arrays.

    Raises: ValueError if the examples differ in structure, or arrays in shape; RuntimeError if torch tensors differ in
        shape.
    """
    return nest.pack_like(examples[0], [_stack(column) for column in _columns(examples)])


def _columns(structures: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Return an iterator over tuples; tuple i has leaf i of every structure in `structures`.

    Raises: ValueError if the structures differ.
    """
    shapes = {nest.describe(structure) for structure in structures}
    if len(shapes) > 1:
        raise ValueError(
            f"the dataset changes its structure: elements must be alike, got {' and '.join(sorted(shapes)[:2])}"
        )
    return zip(*map(nest.flatten, structures), strict=True)


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


def without_examples(batch: Any) -> Any:
    """Return a batch of no examples: each array in `batch` cut to length 0 along its first dimension.

    Numbers, None and arrays without dimensions stay as they are. `batch` is not changed.

    Raises: ValueError if a leaf is no array, no number and not None, for example a string.
    """
    return nest.map_structure(_without_examples, batch)


def _without_examples(leaf: Any) -> Any:
    if arrays.is_array(leaf):
        return leaf[:0] if leaf.ndim else leaf
    if arrays.is_number(leaf) or leaf is None:
        return leaf
    raise ValueError(
        "a replica has no examples in this step, and its batch cannot be made a batch of no examples: it has "
        f"{leaf!r:.60}. Let collate_fn give arrays (np.array of texts), or leave short batches out: drop_last=True, "
        "with a global batch that divides by the number of replicas"
    )


def spec_of(batch: Any) -> Any:
    """Return the structure of `batch`, with an `ArraySpec` in place of each leaf."""
    return nest.map_structure(
        lambda leaf: ArraySpec.of(leaf if arrays.is_array(leaf) else np.asarray(leaf)), batch
    )


def explain_empty_batch(error: Exception, arguments: Any) -> None:
    """Add a hint about `drop_last=True` to the text of `error`, if an array in `arguments` has no examples.

    Called by: `Strategy.run`, if a function raises `error` and there are several replicas. It raises `error` again.
    Args: arguments: the function's arguments, a nest; each component of a distributed value is looked at.
    """
    values = itertools.chain.from_iterable(
        leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        for leaf in nest.flatten(arguments)
    )
    if 0 not in [value.shape[0] for value in values if arrays.is_array(value) and value.ndim]:
        return
    note = (
        "An argument is an array of no examples. If the last global batch is short, and leaves a replica without "
        "examples, leave short batches out: drop_last=True, with a global batch that divides by the number of replicas"
    )
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    elif len(error.args) == 1:
        error.args = (f"{error}\n{note}",)
