"""Roles that the recorded cases do not show."""

import pytest

from mpistrat.cluster_resolver import ClusterSpec
from mpistrat.cluster_resolver import task_roles as roles

CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}


def test_ranks_are_chief_then_workers():
    assert [roles.id_in_cluster(CLUSTER, "worker", i) for i in (0, 1)] == [1, 2]
    assert roles.id_in_cluster(CLUSTER, "chief", 0) == 0
    assert roles.worker_addresses(CLUSTER) == ["c:1", "a:1", "b:1"]
    assert roles.worker_count(CLUSTER, "chief") == 3


def test_worker_0_is_chief_where_there_is_none():
    assert roles.is_chief({"worker": ["a", "b"]}, "worker", 0)
    assert not roles.is_chief({"worker": ["a", "b"]}, "worker", 1)
    assert not roles.is_chief(CLUSTER, "worker", 0)


@pytest.mark.parametrize("index", [-1, 2, None])
def test_a_task_that_is_not_there(index):
    with pytest.raises(ValueError, match=r"2 tasks of job 'worker' \(0\.\.1\)"):
        roles.is_chief(CLUSTER, "worker", index)


def test_clusters_that_nobody_can_lead():
    with pytest.raises(ValueError, match="no task that could lead"):
        roles.collective_leader({"ps": ["p"]}, None, None)
    with pytest.raises(ValueError, match="must be a dict"):
        roles.normalize_cluster_spec(["a"])
    assert roles.normalize_cluster_spec(None) == ClusterSpec({})


def test_a_server_is_a_task_of_its_cluster():
    server = roles.make_server_def(CLUSTER, "worker", 1)
    assert (server.job_name, server.task_index, server.protocol) == ("worker", 1, "grpc")
    with pytest.raises(ValueError, match="no task 7"):
        roles.make_server_def(CLUSTER, "worker", 7)
    with pytest.raises(TypeError, match="ClusterSpec"):
        roles.make_server_def(3)
