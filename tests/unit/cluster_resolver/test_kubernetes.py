"""KubernetesClusterResolver and the official client, with a small API server on this machine."""

import json
import time
from pathlib import Path

import certifi
import pytest

from mpistrat.cluster_resolver import (
    ClusterSpec,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from mpistrat.errors import TopologyError, UnavailableError
from mpistrat.topology import Topology
from support.cloud.kubernetes_api import pod_server

PODS = {
    "job-name=tensorflow": [
        ("b", "10.0.0.2", "Running"),
        ("a", "10.0.0.9", "Running"),
        ("a10", "10.0.0.3", "Running"),
    ]
}


@pytest.fixture
def server():
    with pod_server(PODS) as server:
        yield server


def test_pods_by_name(server):
    resolver = KubernetesClusterResolver(override_client=server.client())
    assert server.asked == []  # building one asks nobody
    expected = ["10.0.0.9:8470", "10.0.0.3:8470", "10.0.0.2:8470"]
    assert resolver.cluster_spec() == ClusterSpec({"worker": expected})
    assert server.asked == ["/api/v1/pods?job-name=tensorflow"]
    server.pods = {}
    assert resolver.cluster_spec() == ClusterSpec({"worker": []})


def test_own_task(server):
    resolver = KubernetesClusterResolver(override_client=server.client())
    assert resolver.master() == resolver.master("worker") == ""
    resolver.task_type, resolver.task_id = "worker", 2
    assert resolver.master() == "grpc://10.0.0.2:8470"
    assert resolver.master(task_id=0, rpc_layer="http") == "http://10.0.0.9:8470"


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_a_pod_that_does_not_run(server, phase):
    server.pods = {"job-name=tensorflow": [("a", "10.0.0.9", "Running"), ("b", "", phase)]}
    resolver = KubernetesClusterResolver(override_client=server.client())
    with pytest.raises(
        RuntimeError, match=f"the pod 'b' .* is not running, its phase is '{phase}'"
    ):
        resolver.cluster_spec()


def test_an_account_that_may_not_list_pods(server):
    server.status = 403
    resolver = KubernetesClusterResolver(override_client=server.client())
    with pytest.raises(RuntimeError, match=r"refuses listing .*: 403 .* needs the right to list"):
        resolver.cluster_spec()


def test_a_client_of_the_user_s_own_that_fails():
    class Client:
        def list_pod_for_all_namespaces(self, **_: object) -> None:
            raise KeyError("not ours")

    with pytest.raises(KeyError, match="not ours"):
        KubernetesClusterResolver(override_client=Client()).cluster_spec()


def test_off_cluster(server, tmp_path, monkeypatch):
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {}}],
    }
    file = tmp_path / "config"
    location = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(location, str(file))
    off_cluster = KubernetesExecutableLocation.OFF_CLUSTER
    resolver = KubernetesClusterResolver(executable_location=off_cluster)
    with pytest.raises(RuntimeError, match=r"cannot be asked: .*set KUBECONFIG"):
        resolver.cluster_spec()
    file.write_text(json.dumps(config))  # which is YAML, too
    assert resolver.cluster_spec().num_tasks("worker") == 3


def test_within_a_cluster(tmp_path, monkeypatch):
    """With the service account; nobody listens at the address."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    resolver = KubernetesClusterResolver()
    with pytest.raises(RuntimeError, match=r"cannot be asked: Service host/port .*OFF_CLUSTER"):
        resolver.cluster_spec()
    token = tmp_path / "token"
    token.write_text("secret")
    module = "kubernetes.config.incluster_config"
    monkeypatch.setattr(f"{module}.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(f"{module}.SERVICE_CERT_FILENAME", str(Path(certifi.where())))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"does not answer to listing .*127.0.0.1"):
        resolver.cluster_spec()
    assert time.monotonic() - began < 60


def test_mpi_tells_the_rank(server, monkeypatch):
    resolver = KubernetesClusterResolver(override_client=server.client())
    for size in (3, 2):
        topology = Topology.from_hosts(1, ["n0", "n1", "n2"][:size], "mpi")
        monkeypatch.setattr(
            "mpistrat.cluster_resolver.mpi.MPIClusterResolver.topology",
            lambda self, topology=topology: topology,
        )
        if size == 3:
            assert resolver.topology() == topology
        else:
            with pytest.raises(TopologyError, match=r"lists 3 tasks .* has started 2 ranks"):
                resolver.topology()


def test_bad_arguments():
    with pytest.raises(ValueError, match="'worker' has the selectors 'a=b': expected a list"):
        KubernetesClusterResolver({"worker": "a=b"})
    with pytest.raises(ValueError, match="executable_location=0 must be"):
        KubernetesClusterResolver(executable_location=0)


def test_without_the_client(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs the package kubernetes: pip install kubernetes"):
        KubernetesClusterResolver()
    KubernetesClusterResolver(override_client=object())
