"""Structures: walked in one order on every rank, and rebuilt as what they were."""

import collections
from typing import NamedTuple

import pytest
import torch

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
    packed = nest.take_apart(structure)[2]([(leaf, "new") for leaf in leaves])
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


class Pair(collections.namedtuple("Pair", "x y")):
    """A namedtuple with a default, as before Python 3.7."""

    def __new__(cls, x, y=None):
        return super().__new__(cls, x, y)


class Movable(NamedTuple):
    x: object

    def to(self, device):
        return Movable(device)


class Encoding(collections.UserDict):
    """Its constructor takes other arguments than a mapping's elements."""

    def __init__(self, x, origin):
        super().__init__(x=x)
        self.origin = origin


@pytest.mark.parametrize(
    "leaf",
    [torch.Size([2, 3]), torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1)])],
    ids=["Size", "PackedSequence"],
)
def test_tuples_that_their_elements_do_not_make_are_leaves(leaf):
    assert nest.flatten([leaf]) == [leaf]
    assert nest.map_structure(lambda value: value, {"a": leaf})["a"] is leaf


@pytest.mark.parametrize(
    "structure", [Pair(1), Movable(1), torch.ones(2, 2).max(0)], ids=["Pair", "Movable", "max"]
)
def test_other_tuples_of_a_class_are_structures(structure):
    mapped = nest.map_structure(lambda leaf: (leaf,), structure, is_leaf=None)
    assert type(mapped) is type(structure)
    assert mapped[0] == (structure[0],)


def test_an_object_of_a_program_is_kept_where_nothing_in_it_changes():
    encoding = Encoding(1, "here")
    assert nest.map_structure(lambda leaf: leaf, [encoding])[0] is encoding
    plain = [1]
    assert nest.map_structure(lambda leaf: leaf, plain) is not plain


def test_a_structure_may_be_taken_for_a_leaf():
    structure = {"a": [1, 2], "b": (3, [4])}
    assert nest.flatten(structure, lambda part: isinstance(part, list)) == [[1, 2], 3, [4]]
    mapped = nest.map_structure(len, [[1, 2]], lambda part: part == [1, 2])
    assert mapped == [2]
