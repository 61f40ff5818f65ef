"""Facts of a node on which everything is as it should be, for tests to spoil."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from mpistrat.tools.doctor.facts import (
    Cores,
    Driver,
    Gpus,
    JobFacts,
    Launch,
    Library,
    MemoryLimits,
    RankFacts,
    Room,
    Software,
)

GB = 10**9
MPICH = Library(
    path="/opt/mpich/lib/libmpi.so.12",
    version="MPICH Version:      4.1.2\nMPICH Release date: ...",
    standard=[4, 0],
    thread_level="multiple",
    candidates=[["LD_LIBRARY_PATH", "/opt/mpich/lib/libmpi.so.12"]],
)


@pytest.fixture
def make_job() -> Callable[..., JobFacts]:
    """`make_job(nodes, per_node, rank=..., **parts)`: `parts` replace fields of each rank's facts."""

    def make(nodes: int = 1, per_node: int = 2, **parts: dict[str, Any]) -> JobFacts:
        size = nodes * per_node
        ranks = []
        for number in range(size):
            node, local = divmod(number, per_node)
            variables = f"PMI_SIZE={size}, PMI_RANK={number}"
            facts = {
                "software": Software(
                    "3.11.2", "/env/bin/python", "1.0", "/env", "4.1", "2.1", "2.13"
                ),
                "launch": Launch(
                    size,
                    number,
                    variables,
                    "mpiexec of MPICH",
                    local == 0,
                    mpirun="/opt/mpich/bin/mpirun",
                ),
                "library": MPICH,
                "cores": Cores(list(range(local * 8, local * 8 + 8)), of_launcher=8 * per_node),
                "memory": MemoryLimits(
                    shared=Room("/dev/shm", 32 * GB, 30 * GB),
                    temporary=Room("/tmp", 500 * GB, 400 * GB),
                    available=60 * GB,
                    files=65536,
                    files_most=65536,
                ),
                "driver": Driver(),
                "gpus": Gpus(torch="2.13") if local == 0 else None,
            }
            for name, changes in parts.items():
                facts[name] = dataclasses.replace(facts[name], **changes) if facts[name] else None
            ranks.append(RankFacts(number, node, f"n{node + 1}", **facts))
        return JobFacts(ranks)

    return make
