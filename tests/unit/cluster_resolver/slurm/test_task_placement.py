"""Block, cyclic, plane and arbitrary distributions, with uneven nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.cluster_resolver.slurm.resolver import place_tasks
from mpistrat.errors import TopologyError


def nodes(counts, distribution, hosts=()):
    return [
        p.node
        for p in place_tasks([(f"n{i}", c) for i, c in enumerate(counts)], distribution, hosts)
    ]


@pytest.mark.parametrize(
    ("counts", "distribution", "expected"),
    [
        ([2, 1, 2], "block", [0, 0, 1, 2, 2]),
        ([2, 1, 2], "unknown", [0, 0, 1, 2, 2]),
        ([2, 1, 2], "cyclic", [0, 1, 2, 0, 2]),
        ([3, 1], "cyclic:block", [0, 1, 0, 0]),
        ([3, 1], "block:cyclic,NoPack", [0, 0, 0, 1]),
        ([4, 2], "plane=2", [0, 0, 1, 1, 0, 0]),
        ([3, 2], "plane=2", [0, 0, 1, 1, 0]),
        ([1, 1], "plane=4", [0, 1]),
        ([], "block", []),
    ],
)
def test_node_of_each_task(counts, distribution, expected):
    assert nodes(counts, distribution) == expected


def test_arbitrary_goes_by_the_list():
    assert nodes([2, 1], "arbitrary", ["n0", "n1", "n0"]) == [0, 1, 0]
    with pytest.raises(TopologyError, match="the step's nodes have"):
        nodes([2, 1], "arbitrary", ["n0", "n1", "n1"])
    with pytest.raises(TopologyError, match="the step's nodes have"):
        nodes([1, 1], "arbitrary", ["n0", "n1", "x"])


@pytest.mark.parametrize("distribution", ["arbitrary", "plane", "plane=0", "plane=x", "zigzag"])
def test_a_distribution_that_does_not_tell_is_an_error(distribution):
    with pytest.raises(TopologyError, match="does not say which task runs where"):
        nodes([2, 2], distribution)


@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.sampled_from(["block", "cyclic", "plane=2", "plane=3"]),
)
def test_every_node_gets_its_count_and_local_ranks_count_up(counts, distribution):
    places = place_tasks([(f"n{i}", c) for i, c in enumerate(counts)], distribution)
    for node, count in enumerate(counts):
        assert [p.local_rank for p in places if p.node == node] == list(range(count))
