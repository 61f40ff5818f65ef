"""Check whether all ranks have the same software."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

from mpistrat.machine.notices import ranks_in_words
from mpistrat.tools.doctor.facts import JobFacts, Ranks, Software, grouped
from mpistrat.tools.doctor.finding import Findings, findings_of
from mpistrat.xla.runtime import what_differs

ok, _, problem = findings_of("software")
_DIFFERENT = "Not the same on all ranks"  # heading of docs/troubleshooting.md
# Fields of `Software` that must be the same on all ranks, and their names in findings
_COMPARED = ("mpistrat", "folder", "python", "mpi4py", "numpy", "torch", "torch_xla")
_NAMES = {"folder": "mpistrat's folder", "python": "Python", "numpy": "NumPy"}


def look() -> Software:
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        mpistrat=version_of("mpistrat") or "of a checkout",
        folder=str(Path(__file__).parents[2]),
        mpi4py=version_of("mpi4py"),
        numpy=version_of("numpy"),
        torch=version_of("torch"),
        torch_xla=version_of("torch_xla"),
    )


def check(job: JobFacts) -> Findings:
    different = list(_differences(job.ranks))
    yield from different
    here = job.first.software
    torch = f"torch {here.torch}" if here.torch else "no torch: NumPy and CuPy only"
    if here.torch_xla:
        torch += f", torch_xla {here.torch_xla}"
        wrong_pair, command = what_differs(here.torch_xla, here.torch)
        if wrong_pair:
            yield problem(f"{wrong_pair}. A program that imports it ends.", command, _DIFFERENT)
    if not different:
        everywhere = " on all ranks" if len(job.ranks) > 1 else ""
        yield ok(
            f"mpistrat {here.mpistrat} ({here.folder}), Python {here.python}, mpi4py {here.mpi4py or 'missing'}, "
            f"NumPy {here.numpy}, {torch}{everywhere}."
        )


def _differences(ranks: Ranks) -> Findings:
    for name in _COMPARED:
        versions = grouped((getattr(rank.software, name), rank.rank) for rank in ranks)
        if len(versions) > 1:
            listed = []
            for version, ranks_with_it in versions.items():
                listed.append(f"{version or 'none'} on {ranks_in_words(ranks_with_it)}")
            yield problem(
                f"{_NAMES.get(name, name)} is not the same on all ranks: {'; '.join(listed)}.",
                "start all ranks with one environment, on a file system that all nodes see: activate it in the job "
                f"script, or name its python there ({ranks[0].software.executable} on rank {ranks[0].rank})",
                _DIFFERENT,
            )


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
