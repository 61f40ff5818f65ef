"""TPUClusterResolver: what it is told, what it finds, and what it is asked."""

import pytest

from mpistrat.cluster_resolver import ClusterSpec, TPUClusterResolver
from mpistrat.cluster_resolver.tpu.resolver import local_cores
from mpistrat.errors import NotFoundError
from mpistrat.topology import Topology
from support.cloud.google_metadata import metadata_server

TPU_ENV = """ACCELERATOR_TYPE: 'v4-16'
CONSUMER_PROJECT_ID: 'some-project'
NODE_ID: 'pod-1'
TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'
TPU_PROCESS_BOUNDS: '1,1,2'
WORKER_ID: '1'
ZONE: 'us-central2-b'
"""
METADATA = {
    "instance/attributes/tpu-env": TPU_ENV,
    "instance/attributes/worker-network-endpoints": "a:1:10.130.0.26,b:2:10.130.0.25",
}
NOWHERE = {"GCE_METADATA_HOST": "127.0.0.1:1"}


@pytest.fixture
def server():
    with metadata_server(METADATA) as server:
        yield server


def test_the_slice_of_this_host(server):
    resolver = TPUClusterResolver(environ=server.environ)
    assert server.asked == []  # building one asks nobody
    expected = ClusterSpec({"worker": ["10.130.0.26:8470", "10.130.0.25:8470"]})
    assert resolver.cluster_spec() == expected
    found = resolver.slice()
    assert (found.accelerator_type, found.worker_id) == ("v4-16", 1)
    assert resolver.num_accelerators() == {"TPU": 4}
    assert len(server.asked) == 2  # and the others are asked once
    assert resolver.master() == "grpc://10.130.0.26:8470"


def test_one_host():
    environ = {
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
        "TPU_WORKER_ID": "0",
    }
    resolver = TPUClusterResolver("", environ=environ)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["localhost:8470"]})
    assert resolver.num_accelerators() == {"TPU": 8}


# What TensorFlow 2.21 answers to the same, except for addresses without grpc://, which it takes for a TPU's name.
@pytest.mark.parametrize(
    "tpu",
    [
        "grpc://10.0.0.1:8470,10.0.0.2:8471",
        "10.0.0.1, grpc://10.0.0.2:8471",
        ["10.0.0.1", "grpc://10.0.0.2:8471"],
        ("grpc://10.0.0.1", "10.0.0.2:8471"),
    ],
)
def test_addresses(tpu):
    resolver = TPUClusterResolver(tpu, environ=NOWHERE)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.1:8470", "10.0.0.2:8471"]})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, None)
    assert resolver.environment == ""
    assert resolver.master() == resolver.master(None, 1) == "grpc://10.0.0.1:8470"
    assert resolver.master("worker", 1, "http") == "grpc://10.0.0.2:8471"
    with pytest.raises(ValueError, match="'ps'"):
        resolver.master("ps", 0)
    with pytest.raises(ValueError, match="2"):
        resolver.master("worker", 2)


def test_a_coordinator():
    resolver = TPUClusterResolver("10.0.0.1", None, None, "hosts", "chief", "n9:1", environ=NOWHERE)
    assert resolver.cluster_spec() == ClusterSpec({"hosts": ["10.0.0.1:8470"], "chief": ["n9:1"]})
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master("chief", 0) == "grpc://n9:1"
    unknown = TPUClusterResolver("10.0.0.1", coordinator_name="chief", environ=NOWHERE)
    assert unknown.cluster_spec().jobs == ["worker"]
    with pytest.raises(ValueError, match="coordinator_address='n9:1' without coordinator_name"):
        TPUClusterResolver("10.0.0.1", coordinator_address="n9:1")


def test_addresses_instead_of_those_that_are_found(server):
    resolver = TPUClusterResolver("w0:1,w1:2", environ=server.environ)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["w0:1", "w1:2"]})
    assert server.asked == []
    assert resolver.slice().addresses == ("w0", "w1")
    with pytest.raises(ValueError, match=r"3 addresses .* for the 2 hosts of a v4-16"):
        TPUClusterResolver(["w0", "w1", "w2"], environ=server.environ).slice()


def test_the_tpu_that_is_meant(server):
    asked = {"tpu": "pod-1", "zone": "us-central2-b", "project": "some-project"}
    assert TPUClusterResolver(**asked, environ=server.environ).slice().name == "pod-1"
    for what, name in (("tpu", "name"), ("zone", "zone"), ("project", "project")):
        resolver = TPUClusterResolver(**{**asked, what: "other"}, environ=server.environ)
        with pytest.raises(ValueError, match=f"{name}='other', but .* v4-16 whose {name} is '"):
            resolver.cluster_spec()


@pytest.mark.parametrize(
    "tpu",
    ["10.0.0.1:port", "10.0.0.1:99999", "grpc://", "10.0.0.1,", ["a", 7], "http://10.0.0.1", "a b"],
)
def test_what_is_no_address(tpu):
    with pytest.raises(ValueError, match="is no address of a TPU host: expected such as '10"):
        TPUClusterResolver(tpu)


def test_a_host_that_is_named_twice():
    with pytest.raises(ValueError, match="names a host twice"):
        TPUClusterResolver("10.0.0.1,grpc://10.0.0.1:8470")


def test_no_tpu():
    resolver = TPUClusterResolver(environ=NOWHERE)
    for ask in (
        resolver.slice,
        resolver.cluster_spec,
        resolver.master,
        resolver.num_accelerators,
    ):
        with pytest.raises(NotFoundError, match="no TPU found"):
            ask()


def test_mpi_tells_the_rank(monkeypatch):
    """Whatever task_id says."""
    topology = Topology.from_hosts(3, ["n0", "n0", "n1", "n1"], "mpi")
    monkeypatch.setattr(
        "mpistrat.cluster_resolver.mpi.MPIClusterResolver.topology", lambda self: topology
    )
    for tpu in (None, "local", "10.0.0.1,10.0.0.2"):
        assert TPUClusterResolver(tpu, environ=NOWHERE).topology() == topology


def test_the_chips_of_this_host(tmp_path):
    for number, (vendor, device) in enumerate(
        [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x8086", "0x0063")]
    ):
        folder = tmp_path / f"0000:00:0{number}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    (tmp_path / "gone").mkdir()
    assert local_cores(tmp_path) == 2
    assert local_cores(tmp_path / "none") == 0


def test_local_is_the_chips_of_this_host(monkeypatch):
    resolver = TPUClusterResolver("local", environ=NOWHERE)
    assert resolver.slice() is None
    assert resolver.cluster_spec() == ClusterSpec({})
    monkeypatch.setattr("mpistrat.cluster_resolver.tpu.resolver.local_cores", lambda: 4)
    assert resolver.num_accelerators() == {"TPU": 4}
