"""The order in which values of replicas are added up."""

import itertools
from collections.abc import Iterator

import pytest

from mpistrat.communicators.reduction.tree import ReductionTree, tree_of_ranks


def level_by_level(values: list[str]) -> str:
    """The definition: neighbours in pairs, an odd one goes up unchanged."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [f"({'+'.join(pair)})" if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def added_up(tree: ReductionTree, values: list[str]) -> list[str]:
    values = list(values)
    for to, added in tree.additions:
        values[to] = f"({values[to]}+{values[added]})"
    return [values[position] for position in tree.left]


def leaves(first: int, end: int) -> list[list[range]]:
    return [[range(i, i + 1)] for i in range(first, end)]


def splits(replicas: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut them into consecutive groups."""
    for number in range(replicas):
        for cuts in itertools.combinations(range(1, replicas), number):
            yield list(itertools.pairwise([0, *cuts, replicas]))


@pytest.mark.parametrize("replicas", [*range(1, 13), 16])
def test_every_split_gives_the_same_sum(replicas: int) -> None:
    names = [f"r{i}" for i in range(replicas)]
    expected = level_by_level(names)
    for groups in splits(replicas):
        partial = [ReductionTree(replicas, leaves(*group)) for group in groups]
        values = [
            value
            for tree, (first, end) in zip(partial, groups, strict=True)
            for value in added_up(tree, names[first:end])
        ]
        whole = ReductionTree(replicas, [tree.sums for tree in partial])
        assert added_up(whole, values) == [expected], groups
        assert whole.sums == [range(replicas)]


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_ranks_of_nodes_add_up_first(size: int, each: int) -> None:
    """Whether a node has neighbouring ranks, or they are dealt out like cards."""
    replicas = size * each
    names = [f"r{i}" for i in range(replicas)]
    tree = tree_of_ranks((each,) * size)
    of_ranks = [
        added_up(
            ReductionTree(replicas, leaves(r * each, (r + 1) * each)),
            names[r * each : (r + 1) * each],
        )
        for r in range(size)
    ]
    for nodes in (
        [list(range(0, size, 2)), list(range(1, size, 2))],
        [list(range(size // 2)), list(range(size // 2, size))],
    ):
        within = [tree.within(node) for node in nodes]
        values = [
            added_up(tree, [value for rank in node for value in of_ranks[rank]])
            for tree, node in zip(within, nodes, strict=True)
        ]
        across = ReductionTree(replicas, [tree.sums for tree in within])
        assert added_up(across, [v for of_node in values for v in of_node]) == [
            level_by_level(names)
        ]


def test_a_power_of_two_of_replicas_is_one_sum() -> None:
    assert tree_of_ranks((2,) * 4).one_each
    assert tree_of_ranks((4,) * 3).one_each
    assert not tree_of_ranks((3,) * 2).one_each
    assert tree_of_ranks((3,) * 2).held == ((range(2), range(2, 3)), (range(3, 4), range(4, 6)))


def test_ranks_with_different_numbers_of_replicas() -> None:
    tree = tree_of_ranks((2, 1, 1))
    assert tree.one_each
    assert tree.held == ((range(2),), (range(2, 3),), (range(3, 4),))
    assert tree_of_ranks((1, 2, 1)).held == (
        (range(1),),
        (range(1, 2), range(2, 3)),
        (range(3, 4),),
    )
