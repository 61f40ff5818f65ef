"""A single process and its TF_CONFIG; tests/mpi/test_tf_config.py has those of several ranks."""

import json

import pytest

import mpistrat as ms
from mpistrat.compat import v1

ADDRESS = ["cmle-training-workerpool0-0:2222"]
# As platforms, and people, set it for a process that trains by itself; and what `task_type` is then.
ALONE = {
    "a chief of one": (
        {"cluster": {"chief": ADDRESS}, "task": {"type": "chief", "index": 0}},
        "chief",
    ),
    "of older platforms": (
        {"cluster": {"master": ADDRESS}, "task": {"type": "master", "index": 0}},
        "worker",
    ),
    "no cluster": ({"environment": "cloud", "task": {"type": "chief", "index": 0}}, "chief"),
    "nothing": ({}, "worker"),
    "an evaluator": (
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}},
        "evaluator",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_process_by_itself_goes_on(monkeypatch, name):
    config, task_type = ALONE[name]
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = ms.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.task_type == task_type
    assert strategy.cluster_resolver.topology().size == 1


TWO = {"worker": ["a:1", "b:1"]}
WRONG = {
    "one of two": (TWO, "worker", 0, ms.errors.TopologyError, "rank 0 of 2, MPI says rank 0 of 1"),
    "a server": (
        {"worker": ["a:1"], "ps": ["b:1"]},
        *("ps", 0, ms.errors.TopologyError),
        "ps 0 (tasks that train: 1), MPI says that this is rank 0 of 1",
    ),
    "a server alone": (
        {"ps": ["b:1"]},
        "ps",
        0,
        ms.errors.TopologyError,
        "ps 0 (tasks that train: 0)",
    ),
    "an unknown type": (TWO, "trainer", 0, ValueError, "'trainer'"),
    "no such task": (TWO, "worker", 2, ValueError, "task_id=2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_process_that_should_not_be_by_itself(monkeypatch, name):
    cluster, kind, index, error, text = WRONG[name]
    task = {"type": kind, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(error) as raised:
        ms.MultiWorkerMirroredStrategy()
    assert text in str(raised.value)


def test_a_worker_by_itself_keeps_variables_whatever_names_no_cluster(monkeypatch):
    for config in ("", "{}", '{"task": {"type": "chief", "index": 0}}'):
        monkeypatch.setenv("TF_CONFIG", config)
        assert v1.ParameterServerStrategy().steps == {"worker 0 (rank 0)": 0}
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(ValueError, match="is no JSON"):
        v1.ParameterServerStrategy()
