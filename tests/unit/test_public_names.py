"""The doors of the package: the names that a program sees."""

import importlib
import pickle
import subprocess
import sys

import pytest

import mpistrat as ms

DOORS = (
    "mpistrat",
    "mpistrat.checkpoint",
    "mpistrat.cluster_resolver",
    "mpistrat.compat",
    "mpistrat.compat.contrib",
    "mpistrat.compat.v1",
    "mpistrat.compat.v1.experimental",
    "mpistrat.coordinator",
    "mpistrat.cross_device_ops",
    "mpistrat.errors",
    "mpistrat.experimental",
    "mpistrat.experimental.partitioners",
    "mpistrat.fault_tolerance",
    "mpistrat.input",
    "mpistrat.strategies",
    "mpistrat.tpu",
    "mpistrat.wire_formats",
)


@pytest.mark.parametrize("door", DOORS)
def test_a_door_shows_public_names_only(door: str) -> None:
    module = importlib.import_module(door)
    assert dir(module) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert not name.startswith("_") or name == "__version__"
        assert hasattr(module, name)


def test_a_star_import_has_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from mpistrat import *", names)
    assert set(names) - {"__builtins__"} == set(ms.__all__)


def test_names_of_experimental_are_those_of_the_package() -> None:
    for door in (ms.experimental, ms.compat.v1.experimental):
        assert door.CollectiveCommunication is ms.CommunicationImplementation
        assert door.CommunicationImplementation is ms.CommunicationImplementation
        assert door.CommunicationOptions is ms.CommunicationOptions
        assert door.CollectiveHints(4, 2.0) == ms.CommunicationOptions(4, 2.0)
    assert ms.experimental.ValueContext is ms.ValueContext
    assert ms.experimental.coordinator is ms.coordinator
    assert issubclass(ms.experimental.TPUStrategy, ms.TPUStrategy)
    assert ms.experimental.TPUStrategy.__name__ == "TPUStrategy"
    assert pickle.loads(pickle.dumps(ms.experimental.TPUStrategy)) is ms.experimental.TPUStrategy
    with pytest.raises(ValueError, match=r"^the device assignment must be .* got 'all'"):
        ms.experimental.TPUStrategy(None, device_assignment="all")  # type: ignore[arg-type]


def test_older_methods_of_a_tpu_resolver() -> None:
    resolver = ms.cluster_resolver.TPUClusterResolver("10.0.0.1", job_name="hosts")
    assert resolver.get_master() == resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.get_job_name() == "hosts"


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"mpistrat\.nothing"):
        importlib.import_module("mpistrat.nothing")


def test_version() -> None:
    command = [sys.executable, "-m", "mpistrat", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown == f"mpistrat {ms.__version__}\n"
