"""MPIClusterResolver on a running MPI: the communicator says who is who."""

import os

import pytest
from mpi4py import MPI

from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.cluster_resolver.launcher import joins_job
from mpistrat.errors import TopologyError

WORLD = MPI.COMM_WORLD


def test_the_default_is_every_rank():
    t = MPIClusterResolver().topology()
    assert (t.rank, t.size, t.launcher) == (WORLD.rank, WORLD.size, "mpi")


def test_all_ranks_agree_about_everything_but_their_rank():
    t = MPIClusterResolver().topology()
    everyone = WORLD.allgather(t)
    assert [other.rank for other in everyone] == list(range(WORLD.size))
    assert {(o.size, o.node_of_rank, o.hosts) for o in everyone} == {
        (t.size, t.node_of_rank, t.hosts)
    }


def test_nodes_are_the_groups_that_share_memory():
    t = MPIClusterResolver().topology()
    node = WORLD.Split_type(MPI.COMM_TYPE_SHARED, key=WORLD.rank)
    try:
        assert t.ranks_on_node(t.node) == tuple(node.allgather(WORLD.rank))
        assert (t.local_rank, t.local_size) == (node.rank, node.size)
    finally:
        node.Free()


def test_slurm_s_node_names_count_more_than_host_names(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    comm = WORLD.Dup()  # not asked for its topology before
    try:
        t = MPIClusterResolver(comm).topology()
    finally:
        comm.Free()
    assert set(t.hosts) == {"n7"}
    assert t.host == "n7"


def test_ranks_that_share_no_node_by_slurm_s_account(monkeypatch):
    """As `srun --mpi=pmi2` misleads MPICH in some heterogeneous jobs."""
    comm = WORLD.Dup()
    try:
        monkeypatch.setenv("SLURMD_NODENAME", f"n{WORLD.rank}")
        if MPIClusterResolver().topology().num_nodes == WORLD.size:
            assert MPIClusterResolver(comm).topology().host == f"n{WORLD.rank}"
            return
        with pytest.raises(TopologyError, match="share a node, but Slurm has started them on n"):
            MPIClusterResolver(comm).topology()
    finally:
        comm.Free()


def test_a_communicator_of_some_ranks_in_another_order():
    comm = WORLD.Split(WORLD.rank % 2, key=-WORLD.rank)
    try:
        t = MPIClusterResolver(comm).topology()
        assert (t.rank, t.size) == (comm.rank, comm.size)
        assert MPIClusterResolver(comm).comm == comm
    finally:
        comm.Free()


def test_it_speaks_the_language_of_the_other_resolvers():
    r = MPIClusterResolver(rpc_layer="grpc")
    spec = r.cluster_spec()
    assert spec.jobs == ["worker"]
    assert spec.num_tasks("worker") == WORLD.size
    assert (r.task_type, r.task_id, r.environment, r.rpc_layer) == (
        "worker",
        WORLD.rank,
        "",
        "grpc",
    )
    assert r.master() == ""
    last = WORLD.size - 1
    assert r.master("worker", last) == "grpc://" + spec.task_address("worker", last)
    with pytest.raises(ValueError, match="no task"):
        r.master("worker", WORLD.size)
    with pytest.raises(RuntimeError, match="cannot be set"):
        r.task_id = 0


def test_the_topology_is_asked_for_once():
    t = MPIClusterResolver().topology()
    if WORLD.rank == 0:  # alone: a second collective call would wait for the others
        assert MPIClusterResolver().topology() is t


def test_what_is_no_communicator_of_this_rank_is_refused():
    with pytest.raises(ValueError, match=f"COMM_NULL on rank {WORLD.rank} of the world"):
        MPIClusterResolver(MPI.COMM_NULL).topology()
    for bad in (3, "world", MPI.Comm.Get_parent()):
        with pytest.raises((TypeError, ValueError), match="comm "):
            MPIClusterResolver(bad).topology()


def test_children_do_not_take_themselves_for_ranks():
    MPIClusterResolver().topology()
    assert not [name for name in os.environ if joins_job(name)]


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_no_communicator_is_left_behind():
    for _ in range(2100):  # MPICH ends after 2,046 of them
        topology = MPIClusterResolver().topology()
    assert topology.size == WORLD.size
