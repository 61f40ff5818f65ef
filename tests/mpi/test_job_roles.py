"""Roles over MPI: all ranks agree, or all raise."""

import json

import pytest
from mpi4py import MPI

from mpistrat.cluster_resolver import (
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from mpistrat.cluster_resolver.roles.job_roles import job_roles
from mpistrat.communicators.construction import communicator_for
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def roles(resolver=None, num_ps=None, *, chief=True):
    gather = communicator_for(WORLD).all_gather_object
    topology = MPIClusterResolver().topology()
    return job_roles(topology, gather, resolver, num_ps, chief=chief, environ={})


def assert_all_agree(mine):
    assert mine.rank == RANK
    assert (
        WORLD.allgather((mine.ranks, mine.cluster_spec)) == [(mine.ranks, mine.cluster_spec)] * SIZE
    )
    tasks = WORLD.allgather((mine.task_type, mine.task_id))
    assert [mine.ranks[job][task] for job, task in tasks] == list(range(SIZE))


@pytest.mark.parametrize("chief", [True, False])
def test_so_many_servers(chief):
    most = SIZE - 1 - chief
    for num_ps in range(1, most + 1):
        mine = roles(num_ps=num_ps, chief=chief)
        assert_all_agree(mine)
        assert len(mine.ranks["ps"]) == num_ps
        assert mine.ranks["chief" if chief else "worker"][0] == 0
    errors = errors_of_ranks(lambda: roles(num_ps=max(most, 0) + 1, chief=chief))
    least = max(most, 0) + 2 + chief
    for kind, message, _ in errors:
        assert kind == "ValueError"
        assert f"but {SIZE} were started: mpirun -n {least} " in message


# Tasks of ranks 0 to 3; a smaller job has the first of them.
TASKS = [("ps", 0), ("chief", 0), ("worker", 0), ("worker", 1)][:SIZE]


def cluster(size=SIZE):
    jobs = {job for job, _ in TASKS[:size]}
    return {job: [f"{job}:{i}" for j, i in TASKS if j == job] for job in sorted(jobs)}


def test_tasks_of_a_resolver():
    resolver = SimpleClusterResolver(ClusterSpec(cluster()), "", *TASKS[RANK])
    if SIZE == 1:
        with pytest.raises(ValueError, match="no worker"):
            roles(resolver, chief=False)
        return
    mine = roles(resolver, chief=False)  # with which a chief works
    assert_all_agree(mine)
    assert (mine.task_type, mine.task_id) == TASKS[RANK]


def test_a_resolver_that_fails_on_one_rank():
    task = {"cluster": cluster(), "task": {"type": TASKS[RANK][0], "index": TASKS[RANK][1]}}
    text = "{" if RANK == SIZE - 1 else json.dumps(task)
    errors = errors_of_ranks(lambda: roles(TFConfigClusterResolver(environ={"TF_CONFIG": text})))
    where = f"rank {SIZE - 1}: " if SIZE > 1 else ""
    for rank, (kind, message, cause) in enumerate(errors):
        assert kind == "ValueError"
        assert message.startswith(f"{where}TF_CONFIG='{{' is no JSON")
        assert cause == ("JSONDecodeError" if rank == SIZE - 1 else "")


def test_ranks_that_claim_one_task():
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": ["a"] * (SIZE - 1), "ps": ["p"]}), "", "ps", 0
    )
    expected = ("TopologyError", "ranks 0 and 1 are both ps 0")
    if SIZE == 1:
        expected = ("ValueError", "no worker")
    for kind, message, _ in errors_of_ranks(lambda: roles(resolver, chief=False)):
        assert kind == expected[0]
        assert message.startswith(expected[1])
