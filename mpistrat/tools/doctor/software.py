"""Is the same software on all ranks?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence

from mpistrat.tools.doctor.facts import Job, Rank, Software
from mpistrat.tools.doctor.finding import OK, PROBLEM, Finding
from mpistrat.tools.doctor.wording import ranks_in_words
from mpistrat.xla.runtime import what_differs

CHECK = "software"
# What must be the same, and what differs harmlessly
_NAMES = {
    "mpistrat": "mpistrat",
    "folder": "mpistrat's folder",
    "python": "Python",
    "mpi4py": "mpi4py",
    "numpy": "NumPy",
    "torch": "torch",
    "torch_xla": "torch_xla",
}


def look() -> Software:
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        mpistrat=_version("mpistrat") or "of a checkout",
        folder=os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")),
        mpi4py=_version("mpi4py"),
        numpy=_version("numpy"),
        torch=_version("torch"),
        torch_xla=_version("torch_xla"),
    )


def check(job: Job) -> Iterator[Finding]:
    different = list(_differences(job.ranks))
    yield from different
    here = job.first.software
    wrong_pair, command = what_differs(here.torch_xla, here.torch) if here.torch_xla else ("", "")
    if wrong_pair:
        yield Finding(CHECK, PROBLEM, f"{wrong_pair}. A program that imports it ends.", command)
    if not different:
        everywhere = " on all ranks" if len(job.ranks) > 1 else ""
        torch = f"torch {here.torch}" if here.torch else "no torch: NumPy and CuPy only"
        torch += f", torch_xla {here.torch_xla}" if here.torch_xla else ""
        yield Finding(
            CHECK,
            OK,
            f"mpistrat {here.mpistrat} ({here.folder}), Python {here.python}, mpi4py {here.mpi4py or 'missing'}, "
            f"NumPy {here.numpy}, {torch}{everywhere}.",
        )


def _differences(ranks: Sequence[Rank]) -> Iterator[Finding]:
    for name, called in _NAMES.items():
        having: dict[str, list[int]] = {}
        for rank in ranks:
            having.setdefault(getattr(rank.software, name), []).append(rank.rank)
        if len(having) > 1:
            told = "; ".join(
                f"{version or 'none'} on {ranks_in_words(who)}" for version, who in having.items()
            )
            yield Finding(
                CHECK,
                PROBLEM,
                f"{called} is not the same on all ranks: {told}.",
                "start all ranks with one environment, on a file system that all nodes see: activate it in the job "
                f"script, or name its python there ({ranks[0].software.executable} on rank {ranks[0].rank})",
            )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
