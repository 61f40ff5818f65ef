"""Device names."""

import sys
import types

import pytest

import mpistrat as ms
from mpistrat.devices import check_device, check_devices, default_devices, num_gpus


@pytest.mark.parametrize(
    ("given", "spelt"),
    [
        ("cpu", "cpu:0"),
        ("CPU:1", "cpu:1"),
        ("/cpu:2", "cpu:2"),
        ("/device:CPU:0", "cpu:0"),
        ("/job:worker/replica:0/task:0/device:CPU:3", "cpu:3"),
    ],
)
def test_spellings(given, spelt):
    assert check_device(given) == spelt


@pytest.mark.parametrize(
    "bad", ["", "cpu:", "cpu:x", "cpu:-1", "disk:0", "cpu:0 ", None, 0, "tpu:0"]
)
def test_what_is_no_device(bad):
    with pytest.raises(ValueError, match="expected a device"):
        check_device(bad)


@pytest.fixture
def two_gpus(monkeypatch):
    cuda = types.SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))


def test_gpus_are_counted(two_gpus):
    assert num_gpus() == 2
    assert check_device("GPU:1") == "cuda:1"
    assert check_devices(["gpu:0", "cuda:1"]) == ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        check_device("cuda:2")
    with pytest.raises(AssertionError, match="distinct"):
        check_devices(["gpu:0", "cuda:0"])


def test_a_rank_s_share_of_the_gpus(two_gpus):
    # Local ranks are counted on each node, and share the GPUs in turn
    hosts = ["a", "b", "a", "b", "a"]
    shares = [default_devices(ms.Topology.from_hosts(r, hosts, "test")) for r in range(5)]
    assert shares == [("cuda:0",), ("cuda:0",), ("cuda:1",), ("cuda:1",), ("cuda:0",)]


def test_without_gpus_a_rank_is_on_the_cpu(monkeypatch):
    for module in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert num_gpus() == 0
    assert default_devices(ms.Topology.single()) == ("cpu:0",)


def test_cupy_counts_too(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 3)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert num_gpus() == 3
