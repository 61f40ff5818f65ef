"""GCEClusterResolver and the official client, with a small API server on this machine."""

import time

import pytest
from google.auth.exceptions import DefaultCredentialsError

from mpistrat.cluster_resolver import ClusterSpec, GCEClusterResolver
from mpistrat.errors import TopologyError, UnavailableError
from mpistrat.topology import Topology
from support.cloud.compute_engine_api import PLACE, compute_engine

INSTANCES = {
    "vm-a": ["10.0.0.9", "192.168.0.1"],
    "vm-b": ["10.0.0.10"],
    "vm-c": ["10.0.0.2"],
    "vm-d": ["10.0.0.1"],
    "vm-e": ["10.0.0.3"],
}


@pytest.fixture
def server():
    with compute_engine(INSTANCES) as server:
        yield server


def resolver_of(server, **kwargs) -> GCEClusterResolver:
    return GCEClusterResolver(**{**PLACE, "port": 8470, **server.client_arguments(), **kwargs})


def test_instances_of_all_pages_sorted_as_text(server):
    server.stopped = frozenset({"vm-d"})
    resolver = resolver_of(server)
    assert server.asked == []  # building one asks nobody
    expected = ["10.0.0.10:8470", "10.0.0.2:8470", "10.0.0.3:8470", "10.0.0.9:8470"]
    assert resolver.cluster_spec() == ClusterSpec({"worker": expected})
    lists = [path for path in server.asked if path.endswith("listInstances")]
    assert len(lists) == 2
    server.page = 500
    server.stopped = frozenset()
    assert resolver.cluster_spec().num_tasks("worker") == 5


def test_own_task(server):
    resolver = resolver_of(server, task_type="ps", task_id=1, rpc_layer=None)
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.master() == "10.0.0.1:8470"
    resolver.task_id = 0
    assert resolver.master() == "10.0.0.10:8470"  # ":" comes after "0"
    assert resolver.master("ps", 4, "grpc") == "grpc://10.0.0.9:8470"
    resolver.task_id = None
    assert resolver.master() == ""
    with pytest.raises(RuntimeError, match="task_type of a GCEClusterResolver"):
        resolver.task_type = "worker"


def test_a_group_that_is_not_there(server):
    resolver = resolver_of(server, instance_group="other")
    with pytest.raises(
        UnavailableError, match=r"group 'other' .* cannot be listed: 404 .*not found"
    ):
        resolver.cluster_spec()


def test_a_busy_service_is_asked_again(server):
    server.busy = 2
    assert resolver_of(server).cluster_spec().num_tasks("worker") == 5


def test_a_service_that_stays_busy(server, monkeypatch):
    monkeypatch.setattr("mpistrat.cluster_resolver.gce.SECONDS", 1.0)
    server.busy = 1000
    with pytest.raises(UnavailableError, match=r"cannot be listed: .*503"):
        resolver_of(server).cluster_spec()


def test_nobody_answers(server):
    server.endpoint = "http://127.0.0.1:1"
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="cannot be listed: "):
        resolver_of(server).cluster_spec()
    assert time.monotonic() - began < 60


def test_without_credentials(server, monkeypatch):
    def none(*_: object, **__: object) -> None:
        raise DefaultCredentialsError("Your default credentials were not found.")

    monkeypatch.setattr("google.auth.default", none)
    with pytest.raises(UnavailableError, match="cannot be listed: Your default credentials were"):
        GCEClusterResolver(**PLACE, port=1).cluster_spec()


def test_mpi_tells_the_rank(server, monkeypatch):
    resolver = resolver_of(server, task_id=4)
    for size in (5, 2):
        topology = Topology.from_hosts(1, [f"n{i}" for i in range(size)], "mpi")
        monkeypatch.setattr(
            "mpistrat.cluster_resolver.mpi.MPIClusterResolver.topology",
            lambda self, topology=topology: topology,
        )
        if size == 5:
            assert resolver.topology() == topology
        else:
            with pytest.raises(TopologyError, match=r"lists 5 tasks .* has started 2 ranks"):
                resolver.topology()


def test_without_the_client(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs the package google-cloud-compute: pip install"):
        GCEClusterResolver(**PLACE, port=1)
