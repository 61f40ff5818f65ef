"""Which cores a rank's replicas have: given topologies and assignments, no devices."""

import pytest

from mpistrat.xla.placement import replicas_of_rank
from mpistrat.xla.system import mesh_of
from mpistrat.xla.topology.device_assignment import DeviceAssignment


def assignment(topology, *replicas):
    """Each replica is a list of (task, device) where `topology` has rank by device."""
    cores = [[[task, device, 0, 0] for task, device in replica] for replica in replicas]
    return DeviceAssignment(topology, cores)


@pytest.fixture
def two_by_two():
    return mesh_of((None, None), 2)


def test_without_an_assignment_each_core_is_a_replica(two_by_two):
    assert [replicas_of_rank(None, two_by_two, rank) for rank in (0, 1)] == [[(0,), (1,)]] * 2


def test_one_replica_over_the_cores_of_a_rank(two_by_two):
    replicas = assignment(two_by_two, [(0, 1), (0, 0)], [(1, 0), (1, 1)])
    assert [replicas_of_rank(replicas, two_by_two, rank) for rank in (0, 1)] == [[(1, 0)], [(0, 1)]]


def test_one_core_of_each_rank(two_by_two):
    replicas = assignment(two_by_two, [(0, 1)], [(1, 0)])
    assert [replicas_of_rank(replicas, two_by_two, rank) for rank in (0, 1)] == [[(1,)], [(0,)]]


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([[(0, 0), (1, 0)]], r"replica 0 has cores of the ranks \[0, 1\]"),
        ([[(0, 0)], [(0, 0)], [(1, 0)], [(1, 1)]], "replicas 0 and 1 both have core 0 of rank 0"),
        ([[(0, 0)], [(0, 1)], [(1, 0)]], r"gives the ranks \[2, 1\] replicas"),
        ([[(0, 0)]], r"gives the ranks \[1, 0\] replicas"),
    ],
)
def test_what_ranks_cannot_run(two_by_two, replicas, message):
    for rank in (0, 1):
        with pytest.raises(ValueError, match=message):
            replicas_of_rank(assignment(two_by_two, *replicas), two_by_two, rank)


def test_programs_run_on_one_core_or_on_all():
    topology = mesh_of((None,), 4)
    with pytest.raises(ValueError, match="2 replicas of 2 cores"):
        replicas_of_rank(assignment(topology, [(0, 0), (0, 1)], [(0, 2), (0, 3)]), topology, 0)
    with pytest.raises(ValueError, match="runs on all that its rank has, 4, and 2 were assigned"):
        replicas_of_rank(assignment(topology, [(0, 0)], [(0, 1)]), topology, 0)


def test_an_assignment_for_another_topology(two_by_two):
    other = mesh_of((None,), 2)
    with pytest.raises(ValueError, match="was built for"):
        replicas_of_rank(assignment(other, [(0, 0)]), two_by_two, 0)


def test_a_mesh_starts_at_its_least_coordinates():
    topology = mesh_of(([(2, 4, 1, 0), (2, 4, 1, 1)], [(3, 4, 1, 0), (3, 4, 1, 1)]), 2)
    assert list(topology.mesh_shape) == [2, 1, 1, 2]
    assert topology.task_ordinal_at_coordinates((1, 0, 0, 1)) == 1
    assert topology.tpu_device_ordinal_at_coordinates((1, 0, 0, 1)) == 1


def test_where_one_rank_has_no_coordinates_rank_by_device():
    topology = mesh_of(([(5, 5, 5, 0)], None), 1)
    assert list(topology.mesh_shape) == [2, 1, 1, 1]
