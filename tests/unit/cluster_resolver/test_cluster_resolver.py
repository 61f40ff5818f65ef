"""What every resolver shares, with the simple and the union one."""

import pytest

from mpistrat.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
    cluster_resolver,
)
from mpistrat.cluster_resolver.cluster_resolver import host_of
from mpistrat.topology import Topology

SPEC = ClusterSpec({"chief": ["n9:1"], "worker": ["n9:2", "n10:1"], "ps": ["n3:1"]})


def test_a_half_made_resolver_fails_at_construction():
    class WithoutMaster(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec({})

    with pytest.raises(TypeError, match="master"):
        WithoutMaster()


def test_accelerators_that_torch_reports_are_counted(monkeypatch):
    """Also where nvidia-smi, and its variable, know nothing of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert TFConfigClusterResolver(environ={}).num_accelerators() == {}
    monkeypatch.setattr(cluster_resolver, "num_accelerators", lambda: 8)
    assert TFConfigClusterResolver(environ={}).num_accelerators() == {"GPU": 8}


def test_the_topology_is_the_chief_then_the_workers():
    t = SimpleClusterResolver(SPEC, task_type="worker", task_id=1).topology()
    assert t == Topology(2, 3, (0, 0, 1), ("n9", "n10"), "simple")
    assert SimpleClusterResolver(SPEC, task_type="chief", task_id=0).topology().rank == 0


def test_an_evaluator_and_an_empty_cluster_are_one_rank():
    assert SimpleClusterResolver(SPEC, task_type="evaluator", task_id=0).topology().size == 1
    assert SimpleClusterResolver(ClusterSpec({})).topology() == Topology.single()


def test_the_only_task_needs_no_name():
    t = SimpleClusterResolver(ClusterSpec({"worker": ["n1:1"]})).topology()
    assert (t.rank, t.size, t.host) == (0, 1, "n1")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ((None, None), "3 workers, but task_type=None"),
        (("worker", None), "task_id=None"),
        (("worker", 2), "task_id=2 is not one of the 2 tasks"),
        (("ps", 0), "has no rank"),
        (("bogus", 0), "bogus"),
    ],
)
def test_a_task_that_is_nobody_is_a_value_error(task, message):
    with pytest.raises(ValueError, match=message):
        SimpleClusterResolver(SPEC, task_type=task[0], task_id=task[1]).topology()


def test_gaps_between_workers_are_a_value_error():
    spec = ClusterSpec({"worker": {0: "a", 2: "c"}})
    with pytest.raises(ValueError, match="without gaps"):
        SimpleClusterResolver(spec, task_type="worker", task_id=0).topology()


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("n1:8888", "n1"),
        ("n1", "n1"),
        ("[fe80::1]:80", "[fe80::1]"),
        ("fe80::1", "fe80::1"),
        ("n1:x", "n1:x"),
    ],
)
def test_the_host_of_an_address(address, host):
    assert host_of(address) == host


def test_simple_refuses_what_is_no_spec_or_no_address():
    with pytest.raises(TypeError, match="ClusterSpec"):
        SimpleClusterResolver({"worker": ["a"]})
    with pytest.raises(TypeError, match="master"):
        SimpleClusterResolver(SPEC, master=3)


def test_union_joins_jobs_in_the_order_of_its_resolvers():
    parts = [SimpleClusterResolver(ClusterSpec({"worker": [w]})) for w in ("b:1", "a:1")]
    union = UnionResolver(*parts, task_type="worker", task_id=1)
    assert union.cluster_spec().as_dict() == {"worker": ["b:1", "a:1"]}
    assert union.topology() == Topology(1, 2, (0, 1), ("b", "a"), "union")


def test_union_refusals():
    simple = SimpleClusterResolver(SPEC)
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="only ClusterResolvers, got 3"):
        UnionResolver(simple, 3)
    with pytest.raises(ValueError, match="colour"):
        UnionResolver(simple, colour="red")
    sparse = SimpleClusterResolver(ClusterSpec({"worker": {1: "x:1", 5: "y:1"}}))
    with pytest.raises(KeyError, match=r"tasks \[1\] of job 'worker'"):
        UnionResolver(simple, sparse).cluster_spec()
