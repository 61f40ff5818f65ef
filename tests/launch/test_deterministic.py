"""`deterministic=True`: training gives the same bits on any number of ranks, with either MPI, by whatever way.

MPICH makes up nodes by dealing the ranks out like cards; so a node's replicas are no neighbours, and their sums travel
side by side. Several nodes of Open MPI need networks of their own.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs" / "deterministic.py"
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}
LET_OTHERS_RUN = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}  # there are fewer cores than ranks


def trained(
    launcher: Launcher, replicas: int, *ranks: int, env: Mapping[str, str] = MappingProxyType({})
) -> dict[tuple[int, str], str]:
    """By ranks and way: hashes of what two models and their losses are after their steps."""
    job = launcher.run_python(
        ranks[0],
        PROGRAM,
        str(replicas),
        *map(str, ranks),
        seconds=300,
        env={**LET_OTHERS_RUN, **env},
    )
    assert job.returncode == 0, job.output
    lines = re.findall(rf"^trained {replicas} (\d+) (\S+) (.+)$", job.stdout, re.M)
    return {(int(number), way): hashes for number, way, hashes in lines}


@pytest.fixture(scope="module")
def one_rank() -> dict[int, str]:
    """By the number of replicas: on one rank, which needs no messages."""
    launcher = Launcher.named("MPICH")
    return {n: trained(launcher, n, 1)[1, "alone"] for n in (6, 8)}


@pytest.mark.time_limit(400)
@pytest.mark.parametrize(
    ("mpi", "replicas", "ranks"),
    [
        ("MPICH", 8, (8, 4, 2)),
        ("Open MPI", 8, (8, 4, 2)),
        ("Open MPI", 6, (6, 3, 2)),
        pytest.param("MPICH", 6, (6, 3, 2), marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_node_train_as_one_does(
    mpi: str, replicas: int, ranks: tuple[int, ...], one_rank: dict[int, str]
) -> None:
    found = trained(Launcher.named(mpi), replicas, *ranks)
    expected = one_rank[replicas]
    assert found == {(n, way): expected for n in ranks for way in ("window", "flat")}


@pytest.mark.time_limit(400)
@pytest.mark.parametrize(("replicas", "ranks"), [(8, (8, 4)), (6, (6, 3))])
def test_ranks_of_two_nodes_train_as_one_does(
    replicas: int, ranks: tuple[int, ...], one_rank: dict[int, str]
) -> None:
    found = trained(Launcher.named("MPICH"), replicas, *ranks, env=TWO_NODES)
    expected = one_rank[replicas]
    assert found == {(n, way): expected for n in ranks for way in ("by-node", "flat")}
