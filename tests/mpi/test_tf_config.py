"""TF_CONFIG beside MPI: what agrees counts, and what contradicts is an error on all ranks."""

import json

import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.cluster_resolver import MPIClusterResolver
from support.rank_errors import assert_usable, errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1


def hosts(number: int) -> list[str]:
    return [f"h{i}:1" for i in range(number)]


def config(cluster: dict[str, list[str]], kind: str = "worker", index: int = RANK) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def set_config(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    if text is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        monkeypatch.setenv("TF_CONFIG", text)


ALL = {"worker": hosts(SIZE)}
MPI_SAYS = f", MPI says rank 0 of {SIZE};"
SERVER = {"worker": hosts(LAST), "ps": ["p:1"]}
# By name: this rank's TF_CONFIG, and what all ranks raise.
CONTRADICTIONS = {
    "more tasks": (config({"worker": hosts(SIZE + 1)}), f"rank 0 of {SIZE + 1}{MPI_SAYS}"),
    "fewer tasks": (config({"worker": ["h:1"]}, index=0), f"rank 0 of 1{MPI_SAYS}"),
    "another order": (config(ALL, index=(RANK + 1) % SIZE), f"rank 1 of {SIZE}{MPI_SAYS}"),
    "one task for all": (config(ALL, index=0), f"rank 0 of {SIZE}, MPI says rank 1 of {SIZE};"),
    "a server": (
        config(SERVER, "ps", 0) if RANK == LAST else config({**SERVER, "worker": hosts(SIZE)}),
        f"rank {LAST}: TF_CONFIG says that this is ps 0 (tasks that train: {LAST}), MPI says that this is rank "
        f"{LAST} of {SIZE}",
    ),
    "an evaluator": (
        config(ALL, "evaluator", 0) if RANK == LAST else config(ALL),
        f"rank {LAST}: TF_CONFIG says that this is evaluator 0 (tasks that train: {SIZE}), MPI says that this is "
        f"rank {LAST} of {SIZE}",
    ),
    "on some ranks": (
        None if RANK == LAST else config(ALL),
        f"and rank {LAST} no cluster (TF_CONFIG names none)",
    ),
    "other clusters": (
        config({"worker": ["x:1"] * SIZE} if RANK == LAST else ALL),
        f"and rank {LAST} the cluster {{'worker': ['x:1'",
    ),
    "no task": (json.dumps({"cluster": ALL}), "do not say which of them this process is"),
    "an unknown task": (config({"trainer": hosts(SIZE)}, "trainer"), "trainer"),
    "no JSON": ("{" if RANK == LAST else config(ALL), f"rank {LAST}: TF_CONFIG='{{' is no JSON"),
}
NO_TASK = {"no task", "an unknown task", "no JSON"}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_raised_by_all_ranks(monkeypatch, name):
    text, expected = CONTRADICTIONS[name]
    set_config(monkeypatch, text)
    errors = errors_of_ranks(ms.MultiWorkerMirroredStrategy)
    assert {kind for kind, _, _ in errors} == {"ValueError" if name in NO_TASK else "TopologyError"}
    assert all(expected in message for _, message, _ in errors), errors
    assert len({message for _, message, _ in errors}) == 1
    # An explicit resolver, or communicator, goes by MPI.
    assert_usable(ms.MultiWorkerMirroredStrategy(MPIClusterResolver()))
    assert_usable(ms.MultiWorkerMirroredStrategy(comm=MPI.COMM_WORLD))


AGREEING = {
    "workers": (config(ALL), ("worker", RANK)),
    "a chief": (
        config(
            {"chief": ["c:1"], "worker": hosts(LAST)},
            "worker" if RANK else "chief",
            max(RANK - 1, 0),
        ),
        ("worker", RANK - 1) if RANK else ("chief", 0),
    ),
    "servers elsewhere": (config({**ALL, "ps": ["p:1"]}), ("worker", RANK)),
    "nothing": ("{}", ("worker", RANK)),
    "an empty text": ("", ("worker", RANK)),
    "no cluster": (
        json.dumps({"task": {"type": "chief", "index": 0}}),
        ("worker" if LAST else "chief", RANK),
    ),
}


@pytest.mark.parametrize("name", AGREEING)
def test_what_agrees_names_the_task(monkeypatch, name):
    text, task = AGREEING[name]
    set_config(monkeypatch, text)
    strategy = ms.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    assert (resolver.task_type, resolver.task_id) == task
    assert (resolver.topology().rank, resolver.topology().size) == (RANK, SIZE)
    assert_usable(strategy)


def test_strategies_of_one_node_do_not_ask(monkeypatch):
    """As in TensorFlow."""
    set_config(monkeypatch, config({"worker": hosts(SIZE + 1)}))
    for kind in (ms.MirroredStrategy, ms.CentralStorageStrategy):
        assert_usable(kind())
