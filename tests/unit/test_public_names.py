"""The doors of the package: what a program sees of it, and what it could once import from elsewhere."""

import importlib
import subprocess
import sys

import pytest

import mpistrat as ms
from mpistrat.compat.moved_modules import MOVED

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


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_moved_still_works_and_warns(old: str) -> None:
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{old}.")]:
        del sys.modules[name]
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__spec__ is not None
    assert module.__spec__.name == MOVED[old]


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"mpistrat\.nothing"):
        importlib.import_module("mpistrat.nothing")


def test_a_moved_command_still_works() -> None:
    command = [sys.executable, "-W", "error::ImportWarning", "-m", "mpistrat.bench", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.startswith("usage: mpistrat-bench")


def test_version() -> None:
    command = [sys.executable, "-m", "mpistrat", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown == f"mpistrat {ms.__version__}\n"
