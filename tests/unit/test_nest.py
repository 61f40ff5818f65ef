"""Structures: walked in one order on every rank, and rebuilt as what they were."""

import collections
from typing import NamedTuple

import pytest

from mpistrat import nest


class Point(NamedTuple):
    x: object
    y: object


STRUCTURES = [
    (5, [5]),
    ([1, (2, 3)], [1, 2, 3]),
    ({"b": 1, "a": [2, 3]}, [2, 3, 1]),  # keys in sorted order, whatever they were inserted in
    (Point(1, {"z": 2}), [1, 2]),
    (collections.OrderedDict(b=1, a=2), [2, 1]),
    ([], []),
    ({}, []),
    (None, [None]),
    ("text", ["text"]),
]


@pytest.mark.parametrize(("structure", "leaves"), STRUCTURES)
def test_flatten_and_its_inverse(structure, leaves):
    assert nest.flatten(structure) == leaves
    packed = nest.pack_like(structure, [(leaf, "new") for leaf in leaves])
    assert nest.flatten(nest.map_structure(lambda leaf: leaf, structure)) == leaves
    assert type(packed) is type(structure) or not nest.is_structure(structure)
    if isinstance(structure, dict):
        assert list(packed) == list(structure)


def test_every_kind_of_structure_is_kept():
    counted = collections.defaultdict(list, b=1, a=2)
    mapped = nest.map_structure(lambda leaf: leaf * 10, [Point(1, (2,)), counted])
    assert mapped == [Point(10, (20,)), {"b": 10, "a": 20}]
    assert type(mapped[0]) is Point
    assert mapped[1].default_factory is list
    assert list(mapped[1]) == ["b", "a"]


def test_leaves_are_visited_in_the_order_of_flatten():
    seen = []
    nest.map_structure(seen.append, {"b": 1, "a": [2, 3]})
    assert seen == [2, 3, 1]


def test_keys_that_cannot_be_ordered_keep_their_order():
    assert nest.flatten({"b": 1, 3: 2}) == [1, 2]


def test_descriptions_show_the_structure_alone():
    assert nest.describe({"b": [1, 2], "a": ()}) == "{'a': (), 'b': [*, *]}"
    assert nest.describe({"a": 1, "b": 2}) == nest.describe({"b": 9, "a": 8})
    assert nest.describe([1]) != nest.describe((1,))
    assert nest.describe(1) == "*"


def test_a_structure_is_walked_once() -> None:
    """The leaves, the text and what arranges other leaves come of one walk."""
    structure = {"b": [1, (2, 3)], "a": {"d": 4, "c": 5}}
    leaves, text, pack = nest.take_apart(structure)
    assert leaves == [5, 4, 1, 2, 3]
    assert text == "{'a': {'c': *, 'd': *}, 'b': [*, (*, *)]}"
    packed = pack(list("vwxyz"))
    assert packed == {"b": ["x", ("y", "z")], "a": {"d": "w", "c": "v"}}
    assert list(packed) == ["b", "a"]
