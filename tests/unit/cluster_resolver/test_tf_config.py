"""TF_CONFIG: read again at each question, and ValueError for whatever is no cluster."""

import contextlib
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.cluster_resolver import TFConfigClusterResolver
from mpistrat.topology import Topology

TWO = {"cluster": {"worker": ["n9:1", "n10:1"]}, "task": {"type": "worker", "index": 1}}


def resolver(config, **arguments):
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(**arguments, environ={"TF_CONFIG": text})


def questions(r):
    return (
        r.cluster_spec,
        lambda: r.task_type,
        lambda: r.task_id,
        lambda: r.rpc_layer,
        r.master,
        r.topology,
    )


def test_a_worker():
    r = resolver(TWO)
    assert r.topology() == Topology(1, 2, (0, 1), ("n9", "n10"), "tf_config")
    assert (r.task_type, r.task_id, r.master(), r.environment) == ("worker", 1, "n10:1", None)


def test_without_it_this_is_one_rank():
    assert TFConfigClusterResolver(environ={}).topology() == Topology.single()


def test_it_is_read_again_at_each_question():
    environ = {"TF_CONFIG": json.dumps(TWO)}
    r = TFConfigClusterResolver(environ=environ)
    assert r.task_id == 1
    environ["TF_CONFIG"] = json.dumps({**TWO, "task": {"type": "worker", "index": 0}})
    assert r.task_id == 0


def test_what_the_caller_says_counts_more():
    r = resolver(TWO, task_type="worker", task_id="0", rpc_layer="grpc")
    assert (r.task_id, r.master()) == (0, "grpc://n9:1")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[1]", "JSON object"),
        ("3", "JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ({"cluster": {"worker": 3}}, 'bad "cluster"'),
        ({"cluster": {"worker": [1]}}, 'bad "cluster"'),
        ({"cluster": {"worker": {"x": "a"}}}, 'bad "cluster"'),
        ({"cluster": TWO["cluster"], "task": "worker"}, '"task" must be'),
        (
            {"cluster": TWO["cluster"], "task": {"type": "worker", "index": "one"}},
            "index must be a number",
        ),
        (
            {"cluster": TWO["cluster"], "task": {"type": "worker", "index": [1]}},
            "index must be a number",
        ),
        (
            '{"cluster": {"worker": ["a", "b"]}, "task": {"type": "worker", "index": Infinity}}',
            "number",
        ),
        ({"cluster": TWO["cluster"]}, "do not say which|not which of them"),
    ],
)
def test_what_is_no_cluster_is_a_value_error(config, message):
    with pytest.raises(ValueError, match=message):
        resolver(config).topology()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
JOB = st.sampled_from(["worker", "chief", "ps", "evaluator", "bogus"])
NEARLY_RIGHT = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(
            JOB, st.lists(st.text(max_size=6), max_size=3) | JSON, max_size=3
        )
        | JSON,
        "task": st.fixed_dictionaries(
            {}, optional={"type": JOB | JSON, "index": st.integers(-1, 4) | JSON}
        )
        | JSON,
        "rpc_layer": JSON,
        "session_master": JSON,
    },
)


@given(st.text() | (JSON | NEARLY_RIGHT).map(json.dumps))
def test_any_text_answers_or_is_a_value_error(text):
    for ask in questions(resolver(text)):
        with contextlib.suppress(ValueError):
            ask()


def test_a_copy_elsewhere_asks_the_environment_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "chief", "index": 0}}')
    sent = pickle.dumps(TFConfigClusterResolver())
    monkeypatch.setenv("TF_CONFIG", '{"task": {"type": "worker", "index": 1}}')
    there = pickle.loads(sent)
    assert (there.task_type, there.task_id) == ("worker", 1)
