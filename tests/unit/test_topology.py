"""Topology: what it derives, and the contradictions that it refuses."""

import dataclasses
import pickle

import pytest

from mpistrat.topology import Topology


def test_a_single_rank():
    single = Topology.single()
    assert (single.rank, single.size, single.node, single.num_nodes) == (0, 1, 0, 1)
    assert (single.local_rank, single.local_size, single.host) == (0, 1, "")


def test_nodes_are_numbered_by_lowest_rank_not_by_name():
    t = Topology.from_hosts(3, ["n9", "n10", "n9", "n11"], "slurm")
    assert t.node_of_rank == (0, 1, 0, 2)
    assert t.hosts == ("n9", "n10", "n11")
    assert (t.node, t.host, t.local_rank, t.local_size, t.launcher) == (2, "n11", 0, 1, "slurm")
    assert t.ranks_on_node(0) == (0, 2)


def test_local_rank_counts_the_ranks_of_the_node():
    t = Topology(rank=4, size=5, node_of_rank=(0, 1, 1, 0, 1))
    assert (t.local_rank, t.local_size, t.ranks_on_node(1)) == (2, 3, (1, 2, 4))


def test_nodes_with_equal_host_names_stay_apart():
    t = Topology.from_lowest_ranks(1, [0, 1, 0, 1], ["vm", "vm", "vm", "vm"], "mpi")
    assert t.node_of_rank == (0, 1, 0, 1)
    assert t.hosts == ("vm", "vm")


def test_it_is_a_value():
    t = Topology(rank=1, size=2, node_of_rank=[0, 0], hosts=["a"])
    assert t == pickle.loads(pickle.dumps(t))
    assert len({t, dataclasses.replace(t)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.rank = 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0, "node_of_rank": ()}, "size=0"),
        ({"rank": 2}, "rank=2 is not one of the 2 ranks"),
        ({"rank": -1}, "rank=-1"),
        ({"node_of_rank": (0,)}, "1 ranks, expected size=2"),
        ({"node_of_rank": (1, 0)}, "rank 0 is on node 1"),
        ({"node_of_rank": (0, 2)}, "the next new node is 1"),
        ({"node_of_rank": (0, -1)}, "rank 1 is on node -1"),
        ({"hosts": ("a", "b")}, "2 hosts for 1 nodes"),
    ],
)
def test_contradictions_are_value_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Topology(**{"rank": 0, "size": 2, "node_of_rank": (0, 0), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": "0"},
        {"rank": True},
        {"size": 2.0},
        {"node_of_rank": 0},
        {"node_of_rank": "00"},
        {"node_of_rank": (0, None)},
        {"hosts": "a"},
        {"hosts": (1,)},
        {"launcher": None},
    ],
)
def test_wrong_types_are_type_errors(fields):
    with pytest.raises(TypeError, match="Topology"):
        Topology(**{"rank": 0, "size": 2, "node_of_rank": (0, 0), **fields})


def test_asking_for_a_node_that_is_not_there():
    with pytest.raises(ValueError, match=r"no node 1: this job has the nodes 0\.\.0"):
        Topology.single().ranks_on_node(1)


def test_a_part_of_the_ranks():
    t = Topology.from_hosts(4, ["a", "b", "b", "c", "c"], "slurm")
    part = t.part((4, 1, 2))
    assert (part.rank, part.size, part.node_of_rank, part.hosts) == (0, 3, (0, 1, 1), ("c", "b"))
    assert (part.local_rank, part.launcher) == (0, "slurm")
    assert Topology(2, 3, (0, 1, 0)).part((0, 2)) == Topology(1, 2, (0, 0), (), "local")
