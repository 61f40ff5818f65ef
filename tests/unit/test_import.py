"""Importing mpistrat is cheap: it starts no MPI and loads no array library but NumPy."""

import json
import subprocess
import sys
from pathlib import Path

HEAVY = ("mpi4py.MPI", "torch", "cupy", "torch_xla", "scipy", "matplotlib")
SECONDS = 0.2
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


def import_in_new_process() -> dict:
    command = [sys.executable, "-c", PROGRAM]
    top = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=top, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def test_import_loads_nothing_heavy() -> None:
    modules = import_in_new_process()["modules"]
    assert [name for name in HEAVY if name in modules] == []


def test_import_is_fast() -> None:
    """The best of several tries: noise on a busy machine only ever adds. One that is slow is slow with NumPy, too."""
    tries = []
    for _ in range(TRIES):
        tries.append(import_in_new_process())
        best = min(one["seconds"] for one in tries)
        if best < max(SECONDS, 2 * min(one["numpy"] for one in tries)):
            break
    assert best < max(SECONDS, 2 * min(one["numpy"] for one in tries))
