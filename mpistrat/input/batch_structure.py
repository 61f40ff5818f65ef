"""How a batch is looked into: its structure, its arrays, and its lists of examples.

The outermost container, mappings and namedtuples are structure. A list or tuple inside them is structure, too, if the
first dimension of its arrays is the batch's number of examples. Another list of that length has one item for each
example, such as a text, or an image of a size of its own: it is a leaf of the batch, like an array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpistrat import arrays, nest


def rows_of(leaf: Any) -> int | None:
    """Return the first dimension of an array; None for an array without dimensions, and for any other value."""
    if not arrays.is_array(leaf) or not leaf.ndim:
        return None
    if arrays.is_nested(leaf):
        return int(leaf.size(0))
    return int(leaf.shape[0])


def is_list(part: Any) -> bool:
    """Whether `part` is a list or tuple. False for mappings and namedtuples, because they are always structure."""
    if not nest.is_structure(part):
        return False
    return not isinstance(part, Mapping) and not hasattr(part, "_fields")


def lists_of_examples(batch: Any, count: int | None) -> Callable[[Any], bool]:
    """Return a function that says of a structure in `batch` whether it is a list of examples, for `nest`'s `is_leaf`.

    Args: count: number of examples in `batch`; None if not known: then nothing is a list of examples.
    """

    def is_leaf(part: Any) -> bool:
        if part is batch or not is_list(part) or len(part) != count:
            return False
        return {rows_of(child) for child in part} - {None} != {count}

    return is_leaf
