"""Importing mpistrat is cheap: it starts no MPI and loads no array library but NumPy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("mpi4py.MPI", "torch", "cupy", "torch_xla", "scipy", "matplotlib")
SECONDS = 0.2
TIMES_NUMPY = (
    3.3  # SECONDS, where NumPy's import takes 0.06 s; a slower machine is slower with NumPy, too
)
TRIES = 9

# CPU seconds of the import itself, which a busy machine stretches less than those of the clock; the
# interpreter's start is over, and NumPy's import counts.
PROGRAM = """
import json, sys, time
started = time.thread_time()
import numpy
numpy_seconds = time.thread_time() - started
import mpistrat
seconds = time.thread_time() - started
print(json.dumps({"seconds": seconds, "numpy": numpy_seconds, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which modules are compiled once, as pip does when it installs, and wherever tests run."""
    folder = str(tmp_path_factory.mktemp("bytecode"))
    rest = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**rest, "PYTHONPYCACHEPREFIX": folder}


def import_in_new_process(environ: dict[str, str]) -> dict:
    command = [sys.executable, "-c", PROGRAM]
    top = Path(__file__).parents[2]
    result = subprocess.run(
        command, cwd=top, env=environ, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout)


def test_import_loads_nothing_heavy(compiled: dict[str, str]) -> None:
    modules = import_in_new_process(compiled)["modules"]
    assert [name for name in HEAVY if name in modules] == []


def test_import_is_fast(compiled: dict[str, str]) -> None:
    """The best of several tries: noise on a busy machine only ever adds."""
    import_in_new_process(compiled)
    tries = []
    for _ in range(TRIES):
        tries.append(import_in_new_process(compiled))
        best = min(measured["seconds"] for measured in tries)
        allowed = max(SECONDS, TIMES_NUMPY * min(measured["numpy"] for measured in tries))
        if best < allowed:
            break
    assert best < allowed
