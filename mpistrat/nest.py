"""Nested structures: lists, tuples, namedtuples and mappings of leaves.

The rules are tf.distribute's: any `Mapping` is a structure and is walked in sorted key order, so that
ranks whose dictionaries were filled in different orders agree; everything else is a leaf.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def is_structure(value: object) -> bool:
    return _is_structure(type(value))  # type: ignore[arg-type]  # mypy takes classes for unhashable


# Asking whether a class is a Mapping takes longer than all else here.
@functools.lru_cache(maxsize=1024)
def _is_structure(kind: type) -> bool:
    return issubclass(kind, (list, tuple, Mapping))


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
    if not is_structure(structure):
        return fn(structure)
    if not isinstance(structure, Mapping):
        return rebuild(
            structure,
            [map_structure(fn, child) if is_structure(child) else fn(child) for child in structure],
        )
    mapped = {key: map_structure(fn, structure[key]) for key in sorted_keys(structure)}
    return rebuild(structure, [mapped[key] for key in structure])


def leaves(structure: Any) -> Iterator[Any]:
    return iter(flatten(structure))


def flatten(structure: Any) -> list[Any]:
    """The leaves, in order."""
    if not is_structure(structure):
        return [structure]
    children = _children(structure)
    if _are_leaves(children):
        return list(children)
    found: list[Any] = []
    for child in children:
        found += flatten(child)
    return found


def _children(structure: Any) -> Any:
    if isinstance(structure, Mapping):
        return [structure[key] for key in sorted_keys(structure)]
    return structure


def _are_leaves(children: Any) -> bool:
    """Whether none is a structure itself: by their classes, which are few."""
    return not any(map(_is_structure, set(map(type, children))))


def pack_like(structure: Any, flat: list[Any]) -> Any:
    """The inverse of `flatten`: `flat` arranged as `structure` is."""
    if isinstance(structure, (list, tuple)) and _are_leaves(structure):
        return rebuild(structure, list(flat))
    remaining = iter(flat)
    return map_structure(lambda _: next(remaining), structure)


def describe(structure: Any) -> str:
    """The shape of the structure alone, `{'a': [*, *]}`; "*" for a leaf. Equal on all ranks or not."""
    if not _is_structure(type(structure)):  # type: ignore[arg-type]
        return "*"
    keys = sorted_keys(structure) if isinstance(structure, Mapping) else None
    children = structure if keys is None else [structure[key] for key in keys]
    inside = ["*"] * len(children) if _are_leaves(children) else list(map(describe, children))
    if keys is None:
        return ("[{}]" if isinstance(structure, list) else "({})").format(", ".join(inside))
    return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(keys, inside, strict=True)) + "}"
