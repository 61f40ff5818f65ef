"""Making strategies: who takes part, what all ranks must agree on, and what each costs."""

import os

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver
from mpistrat.machine.cpu_share import THREAD_COUNTS, intra_op_threads
from mpistrat.strategies import threads
from support.rank_errors import assert_usable, errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
HERE = WORLD.Split_type(MPI.COMM_TYPE_SHARED).allgather(RANK)  # the ranks of this node
CPUS = ["cpu:0", "cpu:1", "cpu:2"]


BY_DEFAULT = {ms.MultiWorkerMirroredStrategy: list(range(SIZE)), ms.MirroredStrategy: HERE}


@pytest.mark.parametrize("kind", BY_DEFAULT)
def test_every_rank_of_the_job_or_of_the_node_by_default(kind):
    strategy = kind()
    ranks = BY_DEFAULT[kind]
    rank, size = ranks.index(RANK), len(ranks)
    assert strategy.num_replicas_in_sync == size
    extended = strategy.extended
    assert (extended.communicator.rank, extended.communicator.size) == (rank, size)
    assert (extended.num_local_replicas, extended.first_replica_id) == (1, rank)
    assert extended.should_checkpoint == (rank == 0)
    assert_usable(strategy)


@pytest.mark.parametrize("kind", BY_DEFAULT)
def test_several_replicas_per_rank(kind):
    strategy = kind(devices=CPUS)
    assert strategy.num_replicas_in_sync == 3 * len(BY_DEFAULT[kind])
    assert strategy.extended.worker_devices == tuple(CPUS)
    assert_usable(strategy)


def test_a_hundred_strategies_share_one_duplicate():
    # MPICH has no more than 2,046
    communicators = {
        id(kind().extended.communicator)
        for kind in (ms.MultiWorkerMirroredStrategy, ms.MirroredStrategy)
        for _ in range(50)
    }
    nodes = WORLD.allreduce(HERE[0] == RANK)
    assert len(communicators) == min(nodes, 2) or SIZE == 1  # one more for the ranks of the node


def test_the_ranks_of_a_node(monkeypatch):
    hosts = ["n9" if rank < (SIZE + 1) // 2 else "n10" for rank in range(SIZE)]
    topology = ms.Topology.from_hosts(RANK, hosts, "test")
    # Not the world: earlier tests may have split that by the nodes that MPI sees, some ranks as here and some not.
    comm = WORLD.Dup()
    monkeypatch.setattr(MPIClusterResolver, "comm", comm)
    monkeypatch.setattr(MPIClusterResolver, "topology", lambda self: topology)
    mine = topology.ranks_on_node(topology.node)
    strategies = [ms.MirroredStrategy() for _ in range(3)]
    for strategy in strategies:
        assert strategy.num_replicas_in_sync == len(mine)
        total = strategy.reduce("sum", strategy.run(lambda: RANK), axis=None)
        assert total == (sum(mine) if len(mine) > 1 else RANK)
    groups = {id(strategy.extended.communicator) for strategy in strategies}
    assert len(groups) == 1 or SIZE == 1
    comm.Free()


def test_the_ranks_of_a_communicator_of_the_user_s():
    comm = WORLD.Split(RANK % 2, key=-RANK)
    try:
        mine = [rank for rank in reversed(range(SIZE)) if rank % 2 == RANK % 2]
        for kind in (ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy):
            strategy = kind(comm=comm)
            assert strategy.num_replicas_in_sync == len(mine)
            assert strategy.extended.first_replica_id == mine.index(RANK)
            gathered = strategy.gather(strategy.run(lambda: np.array([RANK])), axis=0)
            assert gathered.tolist() == (mine if len(mine) > 1 else [RANK])
            with strategy.scope():
                variable = ms.Variable(float(RANK))
            assert float(variable) == mine[0]
    finally:
        comm.Free()


def test_a_rank_alone():
    strategy = ms.MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF, devices=["cpu:0", "cpu:1"])
    assert strategy.num_replicas_in_sync == 2
    if RANK == 0:  # a collective would wait for the others
        assert_usable(strategy)


def test_the_resolver_may_be_given():
    resolver = MPIClusterResolver()
    strategy = ms.MultiWorkerMirroredStrategy(resolver)
    assert strategy.cluster_resolver is resolver
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_a_resolver_that_contradicts_mpi(monkeypatch):
    workers = ",".join(f'"h{i}:1"' for i in range(SIZE + 1))
    monkeypatch.setenv(
        "TF_CONFIG",
        f'{{"cluster": {{"worker": [{workers}]}}, "task": {{"type": "worker", "index": {RANK}}}}}',
    )
    resolver = ms.cluster_resolver.TFConfigClusterResolver()
    errors = errors_of_ranks(lambda: ms.MultiWorkerMirroredStrategy(resolver))
    expected = f"rank 0: TFConfigClusterResolver says this is rank 0 of {SIZE + 1}, MPI says rank 0 of {SIZE};"
    assert {kind for kind, _, _ in errors} == {"TopologyError"}
    assert all(text.startswith(expected) for _, text, _ in errors), errors


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_s_resolver_raises_all_raise():
    class Unreachable(ms.cluster_resolver.SimpleClusterResolver):
        def topology(self):
            raise OSError("no such host")

    spec = ms.cluster_resolver.ClusterSpec({"worker": ["a"] * SIZE})
    kind = Unreachable if RANK == LAST else ms.cluster_resolver.SimpleClusterResolver
    resolver = kind(spec, task_type="worker", task_id=RANK)
    errors = errors_of_ranks(lambda: ms.MultiWorkerMirroredStrategy(resolver))
    expected = ("TopologyError", f"rank {LAST}: OSError: no such host")
    assert {error[:2] for error in errors} == {expected}
    assert [cause for _, _, cause in errors if cause] == ["OSError"]


# All ranks must make the same strategy


@pytest.mark.mpi(min_size=2)
def test_different_numbers_of_replicas():
    errors = errors_of_ranks(
        lambda: ms.MultiWorkerMirroredStrategy(devices=CPUS[: 3 if RANK == LAST else 2])
    )
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}
    assert all("with 2 replicas" in text and "with 3 replicas" in text for _, text, _ in errors)
    assert_usable(ms.MultiWorkerMirroredStrategy())


OTHER_CALLS = {
    "another strategy": lambda strategy: ms.MirroredStrategy(),
    "a reduction": lambda strategy: strategy.reduce("sum", np.ones(2), axis=None),
    "a barrier": lambda strategy: strategy.extended.communicator.barrier(),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", OTHER_CALLS)
def test_some_ranks_do_something_else_instead(other):
    strategy = ms.MultiWorkerMirroredStrategy()

    def construct():
        if RANK == 0:
            ms.MultiWorkerMirroredStrategy()
        else:
            OTHER_CALLS[other](strategy)

    errors = errors_of_ranks(construct)
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert all("constructor of MultiWorkerMirroredStrategy" in text for _, text, _ in errors)
    assert_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_a_constructor_that_one_rank_skips():
    strategy = ms.MultiWorkerMirroredStrategy()

    def construct():
        if RANK != LAST:
            ms.MirroredStrategy()
        strategy.reduce("sum", np.ones(2), axis=None)

    errors = errors_of_ranks(construct)
    assert {name for name, _, _ in errors} == {"CollectiveMismatchError"}, errors
    assert_usable(strategy)


# Compute threads


@pytest.fixture
def unset_threads(monkeypatch):
    for name in THREAD_COUNTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "announced", False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_compute_threads_are_shared_out_and_announced_once(unset_threads, capfd):
    mine = os.sched_getaffinity(0)
    everyone = WORLD.allgather(mine)
    here = [everyone[rank] for rank in HERE]
    torch.set_num_threads(7)
    for _ in range(2):
        ms.MultiWorkerMirroredStrategy()
    expected = 7 if SIZE == 1 else intra_op_threads(mine, here)
    assert torch.get_num_threads() == expected
    announced = capfd.readouterr().err.count(f"mpistrat: {expected} compute thread")
    assert announced == (RANK == 0 and SIZE > 1)


def test_threads_that_the_user_set_stay(monkeypatch, unset_threads, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    ms.MultiWorkerMirroredStrategy()
    assert torch.get_num_threads() == 3
    assert "compute thread" not in capfd.readouterr().err
