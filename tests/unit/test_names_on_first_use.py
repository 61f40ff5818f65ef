"""The names of the package are loaded when a program first uses them."""

import json
import pickle
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

import mpistrat as ms
from mpistrat.machine.first_use import load_on_first_use

MOST_AFTER_IMPORT = 80
MOST_WITH_A_STRATEGY = 170

COUNT = """
import json, sys
names = [name for name in sys.modules if name.partition(".")[0] == "mpistrat"]
print(json.dumps(sorted(names)))
"""
NO_LAUNCHER: dict[str, str] = {}
LAUNCHERS = {
    "MPICH": {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "0"},
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    },
}


def modules_after(program: str, environ: Mapping[str, str] = NO_LAUNCHER) -> list[str]:
    here = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", program + COUNT],
        env={**here, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded: list[str] = json.loads(result.stdout)
    return loaded


@pytest.mark.parametrize("environ", [NO_LAUNCHER, *LAUNCHERS.values()], ids=["alone", *LAUNCHERS])
def test_an_import_loads_little(environ: dict[str, str]) -> None:
    loaded = modules_after("import mpistrat", environ)
    assert len(loaded) <= MOST_AFTER_IMPORT
    assert "mpistrat.strategy" not in loaded


@pytest.mark.parametrize("make", ["OneDeviceStrategy('cpu:0')", "MultiWorkerMirroredStrategy()"])
def test_a_strategy_of_one_rank_loads_half(make: str) -> None:
    without_mpi = "import sys; sys.modules['mpi4py.MPI'] = None"
    loaded = modules_after(f"{without_mpi}; import mpistrat as ms; strategy = ms.{make}")
    assert len(loaded) <= MOST_WITH_A_STRATEGY


def test_a_compiled_function_asks_for_the_default_strategy() -> None:
    """Dynamo cannot make it: it is there when a program has the name of a function that asks for it."""
    program = """
import torch
from mpistrat import compute_average_loss
mean = torch.compile(lambda x: compute_average_loss(x), backend="eager", fullgraph=True)
assert mean(torch.ones(2)) == 1.0
"""
    assert "mpistrat.strategies.default" in modules_after(program)


def test_a_program_without_a_strategy_has_the_default_one() -> None:
    program = """
import threading
import mpistrat as ms
assert "mpistrat.strategies.default" not in __import__("sys").modules
assert not ms.has_strategy()
found = []
threads = [threading.Thread(target=lambda: found.append(ms.get_strategy())) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8 and len(set(map(id, found))) == 1, found
assert found[0].num_replicas_in_sync == 1
assert ms.get_replica_context().replica_id_in_sync_group == 0
"""
    assert "mpistrat.strategies.default" in modules_after(program)


def test_each_way_to_a_name() -> None:
    program = """
import mpistrat
from mpistrat import ReduceOp as first, experimental
from mpistrat.experimental import CollectiveCommunication, partitioners
import mpistrat.compat.v1 as v1
assert mpistrat.ReduceOp is first is v1.ReduceOp
assert mpistrat.experimental is experimental and experimental.partitioners is partitioners
assert CollectiveCommunication is mpistrat.CommunicationImplementation
assert v1.Strategy is v1.StrategyV1
assert mpistrat.coordinator.PerWorkerValue is mpistrat.coordinator.PerWorkerValues
assert dir(mpistrat) == sorted(mpistrat.__all__)
"""
    assert "mpistrat.reduce_op" in modules_after(program)


def test_names_are_pickled_as_before() -> None:
    for value in (ms.ReduceOp.SUM, ms.Topology, ms.errors.StallError, ms.compute_average_loss):
        assert pickle.loads(pickle.dumps(value)) is value


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'mpistrat' has no attribute 'Nothing'"):
        ms.Nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'mpistrat'"):
        from mpistrat import Nothing  # noqa: F401
    assert not hasattr(ms.experimental, "Nothing")


def test_the_table_is_what_the_module_would_import(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
if TYPE_CHECKING:
    import os
    from collections import OrderedDict, deque as queue
    from os import path
else:
    __getattr__, __dir__, __all__ = load_on_first_use(__name__)
"""
    module = types.ModuleType("module_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(TYPE_CHECKING=False, load_on_first_use=load_on_first_use)
    exec(source, vars(module))
    import collections
    import os

    assert module.OrderedDict is collections.OrderedDict
    assert vars(module)["OrderedDict"] is collections.OrderedDict  # the next use is as fast as any
    assert (module.queue, module.path) == (collections.deque, os.path)
    for name in ("deque", "os", "load"):
        assert not hasattr(module, name)
