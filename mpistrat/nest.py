"""Nested structures: lists, tuples, namedtuples and mappings of leaves.

The rules are tf.distribute's: any `Mapping` is a structure and is walked in sorted key order, so that
ranks whose dictionaries were filled in different orders agree; everything else is a leaf.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def is_structure(value: object) -> bool:
    return isinstance(value, (list, tuple, Mapping))


def sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    """Keys in an order that does not depend on insertion, where they can be ordered."""
    try:
        return sorted(mapping)
    except TypeError:
        return list(mapping)


def rebuild(like: Any, children: list[Any]) -> Any:
    """A structure of `like`'s type with `children` in the order of its elements (or keys)."""
    if isinstance(like, Mapping):
        make: Any = type(like)
        pairs = dict(zip(like, children, strict=True))
        if isinstance(like, collections.defaultdict):
            return make(like.default_factory, pairs)
        return make(pairs)
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return type(like)(children)


def map_structure(fn: Callable[[Any], Any], structure: Any) -> Any:
    """`structure` with `fn` applied to every leaf, in the order of `flatten`."""
    if isinstance(structure, Mapping):
        mapped = {key: map_structure(fn, structure[key]) for key in sorted_keys(structure)}
        return rebuild(structure, [mapped[key] for key in structure])
    if isinstance(structure, (list, tuple)):
        return rebuild(structure, [map_structure(fn, child) for child in structure])
    return fn(structure)


def leaves(structure: Any) -> Iterator[Any]:
    if isinstance(structure, Mapping):
        for key in sorted_keys(structure):
            yield from leaves(structure[key])
    elif isinstance(structure, (list, tuple)):
        for child in structure:
            yield from leaves(child)
    else:
        yield structure


def flatten(structure: Any) -> list[Any]:
    return list(leaves(structure)) if is_structure(structure) else [structure]


def pack_like(structure: Any, flat: list[Any]) -> Any:
    """The inverse of `flatten`: `flat` arranged as `structure` is."""
    remaining = iter(flat)
    return map_structure(lambda _: next(remaining), structure)


def describe(structure: Any) -> str:
    """The shape of the structure alone, `{'a': [*, *]}`; "*" for a leaf. Equal on all ranks or not."""
    if isinstance(structure, Mapping):
        inside = ", ".join(f"{key!r}: {describe(structure[key])}" for key in sorted_keys(structure))
        return "{" + inside + "}"
    if isinstance(structure, list):
        return "[" + ", ".join(map(describe, structure)) + "]"
    if isinstance(structure, tuple):
        return "(" + ", ".join(map(describe, structure)) + ")"
    return "*"
