"""Nested structures: lists, tuples, namedtuples and mappings of leaves.

The rules are tf.distribute's: any `Mapping` is a structure, too, and every other value is a leaf. So are
`torch.Size` and `PackedSequence`, though they are tuples: their elements alone do not make them. A mapping is walked in
the order of its sorted keys, because ranks may fill their dictionaries in different orders.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

# Says of a structure whether it is a leaf nevertheless; None: no structure is.
IsLeaf: TypeAlias = Callable[[Any], bool] | None
# The leaves of a structure, its text by `describe`, and a function from a list of leaves to a structure of that shape.
_Apart: TypeAlias = tuple[list[Any], str, Callable[[list[Any]], Any]]


def is_structure(value: object) -> bool:
    return _is_structure(type(value))  # type: ignore[arg-type]  # mypy takes classes for unhashable


# Cached: asking whether a class is a Mapping takes longer than everything else in this file.
@functools.lru_cache(maxsize=1024)
def _is_structure(kind: type) -> bool:
    if issubclass(kind, tuple):
        return not _constructs_itself(kind)
    return issubclass(kind, (list, Mapping))


def _constructs_itself(kind: type) -> bool:
    """Whether a tuple of class `kind` needs more than its elements: `torch.Size`, torch's `PackedSequence`.

    False for namedtuples, also for namedtuples that have a method `to` but no constructor of their own.
    """
    owner = next(base for base in kind.__mro__ if "__new__" in vars(base))
    return "_fields" not in vars(owner) and (hasattr(kind, "to") or hasattr(kind, "numel"))


def is_of_program(structure: Any) -> bool:
    """Whether the class of `structure` is neither Python's own nor a namedtuple, so that it may have attributes."""
    module = type(structure).__module__
    return not (module in ("builtins", "collections") or hasattr(structure, "_fields"))


def sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of `mapping`, sorted; in the order of insertion if they cannot be compared."""
    try:
        return sorted(mapping)
    except TypeError:
        return list(mapping)


def rebuild(like: Any, children: list[Any]) -> Any:
    """Return a structure of the type of `like` with the elements `children`.

    For a mapping, `children` are in the order of insertion of the keys of `like`, not in sorted order. `children` are
    not flattened: each replaces one element of `like`.
    """
    if isinstance(like, Mapping):
        make: Any = type(like)
        pairs = dict(zip(like, children, strict=True))
        if isinstance(like, collections.defaultdict):
            return make(like.default_factory, pairs)
        return make(pairs)
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return type(like)(children)


def map_structure(fn: Callable[[Any], Any], structure: Any, is_leaf: IsLeaf = None) -> Any:
    """Return a structure of the shape of `structure`, with `fn(leaf)` in place of each leaf.

    `fn` is called in the order of `flatten`. If `structure` is no structure, the result is `fn(structure)`.
    """
    if not is_structure(structure):
        return fn(structure)
    leaves, _, arrange = take_apart(structure, is_leaf)
    return arrange([fn(leaf) for leaf in leaves])


def flatten(structure: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """Return the leaves of `structure` in order; a value that is no structure is the only leaf."""
    return take_apart(structure, is_leaf)[0]


def take_apart(structure: Any, is_leaf: IsLeaf = None) -> _Apart:
    """Return the leaves of a structure, its text by `describe`, and a function that makes such a structure of leaves.

    The function takes a list of as many leaves and returns a structure of the shape of `structure`. If `structure` is
    no structure, it is the only leaf, and its text is "*".

    Args: is_leaf: is called with `structure`, and with the structures in it.
    """
    if not is_structure(structure) or (is_leaf is not None and is_leaf(structure)):
        return [structure], "*", operator.itemgetter(0)
    keys = None
    children = structure
    if isinstance(structure, Mapping):
        keys = sorted_keys(structure)
        children = [structure[key] for key in keys]
    nested: list[_Apart] = []
    leaves = list(children)
    inside = ["*"] * len(leaves)
    kinds: set[Any] = {type(child) for child in children}  # distinct classes are few
    if any(_is_structure(kind) for kind in kinds):
        leaves = []
        inside = []
        for child in children:
            part = take_apart(child, is_leaf)
            nested.append(part)
            leaves.extend(part[0])
            inside.append(part[1])
    first, last = "[]" if isinstance(structure, list) else "()"
    if keys is not None:
        pairs = zip(keys, inside, strict=True)
        inside = [f"{key!r}: {text}" for key, text in pairs]
        first, last = "{}"
    arrange = functools.partial(_arranged, structure, keys, nested)
    elements = ", ".join(inside)
    return leaves, f"{first}{elements}{last}", arrange


def _arranged(
    structure: Any, keys: list[Any] | None, nested: list[_Apart], leaves: list[Any]
) -> Any:
    """Return a structure of the shape of `structure`, made of `leaves`, in the order of `flatten`.

    Args:
        keys: the sorted keys of `structure` if it is a mapping; else None.
        nested: `take_apart` of the children of `structure`; empty if all children are leaves.
    """
    children = list(leaves)
    if nested:
        children = []
        start = 0
        for part, _, arrange in nested:
            end = start + len(part)
            children.append(arrange(leaves[start:end]))
            start = end
    if keys is not None:
        by_key = dict(zip(keys, children, strict=True))
        children = [by_key[key] for key in structure]
    if is_of_program(structure):
        before = structure.values() if keys is not None else structure
        pairs = zip(children, before, strict=True)
        if all(new is old for new, old in pairs):
            return structure  # has attributes that `rebuild` does not know
    return rebuild(structure, children)


def describe(structure: Any) -> str:
    """Return the shape of `structure` as text, with "*" for each leaf: "{'a': [*, *]}".

    Structures of equal shapes have equal texts. A namedtuple's text is a tuple's; a mapping's keys are sorted.
    """
    return take_apart(structure)[1]
