"""`deterministic=True`: training gives the same bits on any number of ranks, with either MPI, by whatever way.

MPICH makes up nodes by dealing the ranks out like cards; so a node's replicas are no neighbours, and their sums travel
side by side. Several nodes of Open MPI need networks of their own; there the first ranks are one node's.
"""

import re
from pathlib import Path

import pytest

from support.clusters import two_nodes
from support.harness.mpi_launcher import Job, Launcher

PROGRAM = Path(__file__).parent / "programs" / "deterministic.py"
LONG = pytest.mark.long("Up to eight ranks share the cores, and train two models by each way.")
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}

Trained = tuple[int, str, str]  # ranks, the way, and hashes of two models and their losses


def trained(job: Job, replicas: int) -> set[Trained]:
    assert job.returncode == 0, job.output
    lines = re.findall(rf"^trained {replicas} (\d+) (\S+) (.+)$", job.stdout, re.M)
    return {(int(ranks), way, hashes) for ranks, way, hashes in lines}


def train(launcher: Launcher, replicas: int, *ranks: int, **env: str) -> set[Trained]:
    arguments = map(str, (replicas, *ranks))
    job = launcher.run_python(ranks[0], PROGRAM, *arguments, seconds=300, env=env, forked=True)
    return trained(job, replicas)


@pytest.fixture(scope="module")
def one_rank() -> dict[int, str]:
    """Hashes by the number of replicas: on one rank, which needs no messages."""
    launcher = Launcher.named("MPICH")
    return {n: hashes for n in (6, 8) for _, _, hashes in train(launcher, n, 1)}


@LONG
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
    expected = one_rank[replicas]
    assert train(Launcher.named(mpi), replicas, *ranks) == {
        (n, way, expected) for n in ranks for way in ("window", "flat")
    }


@LONG
@pytest.mark.time_limit(400)
@pytest.mark.parametrize(
    ("replicas", "ranks"),
    [(8, (8, 4, 2)), pytest.param(6, (6, 3, 2), marks=pytest.mark.slow)],
)
def test_ranks_of_two_nodes_train_as_one_does(
    replicas: int, ranks: tuple[int, ...], one_rank: dict[int, str]
) -> None:
    """Of the last two ranks, each is alone on its node."""
    *several, two = ranks
    expected = one_rank[replicas]
    found = train(Launcher.named("MPICH"), replicas, *ranks, **TWO_NODES)
    by_node = {(n, way, expected) for n in several for way in ("by-node", "flat")}
    assert found == by_node | {(two, "flat", expected)}


@LONG
@pytest.mark.time_limit(200)
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_of_two_nodes_of_open_mpi_train_as_one_does(
    tmp_path: Path, ranks: int, one_rank: dict[int, str]
) -> None:
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    with two_nodes.two_nodes(tmp_path) as nodes:
        job = nodes.run_python(
            Launcher.named("Open MPI"),
            ranks // 2,
            *(PROGRAM, "8", str(ranks)),
            seconds=150,
        )
    assert trained(job, 8) == {(ranks, way, one_rank[8]) for way in ("by-node", "flat")}
