"""ClusterSpec: its forms, its questions, its refusals."""

import pickle

import pytest

from mpistrat.cluster_resolver import ClusterSpec


def test_lists_dicts_and_copies_are_the_same_cluster():
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "p:1"}})
    assert spec == ClusterSpec({"ps": {"3": "p:1"}, "worker": {1: "b:1", 0: "a:1"}})
    assert spec == ClusterSpec(spec) == ClusterSpec(spec.as_cluster_def())
    assert hash(spec) == hash(ClusterSpec(spec))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec != ClusterSpec({"worker": ["a:1"]})
    assert spec != {"worker": ["a:1", "b:1"], "ps": {3: "p:1"}}


def test_questions():
    spec = ClusterSpec({"worker": ("a:1", "b:1"), "ps": {3: "p:1"}, "chief": []})
    assert spec.jobs == ["worker", "ps", "chief"]
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": {3: "p:1"}, "chief": {}}
    assert spec.num_tasks("ps") == 1
    assert spec.task_indices("ps") == [3]
    assert spec.job_tasks("ps") == [None, None, None, "p:1"]
    assert spec.task_address("worker", 1) == "b:1"
    assert repr(spec) == "ClusterSpec({'chief': {}, 'ps': {3: 'p:1'}, 'worker': ['a:1', 'b:1']})"
    assert not ClusterSpec({})


def test_what_is_not_there_is_a_value_error_that_says_what_is():
    spec = ClusterSpec({"worker": ["a:1"], "ps": []})
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match=r"no job 'nope'.*\['worker', 'ps'\]"):
            ask("nope")
    with pytest.raises(ValueError, match=r"no task 1 in job 'worker': its tasks are \[0\]"):
        spec.task_address("worker", 1)
    with pytest.raises(ValueError, match="has no tasks"):
        spec.job_tasks("ps")


@pytest.mark.parametrize(
    "bad", [None, ["a"], {"worker": 3}, {"worker": "a:1"}, {"worker": [1]}, {1: ["a"]}]
)
def test_what_is_no_cluster_is_a_type_error(bad):
    with pytest.raises(TypeError, match="ClusterSpec"):
        ClusterSpec(bad)


@pytest.mark.parametrize("index", ["x", -1, None, float("inf"), float("nan")])
def test_what_is_no_index_is_a_value_error(index):
    with pytest.raises(ValueError, match="number from 0 on"):
        ClusterSpec({"worker": {index: "a:1"}})
