"""Distributed values: taking structures apart for replicas, and putting their results together."""

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat.values import Mirrored, PerReplica, regroup, select_replica

SHARED = object()


def test_components():
    value = PerReplica([1, 2])
    assert value.values == (1, 2)
    assert repr(value) == "PerReplica:{\n  0: 1,\n  1: 2\n}"
    with pytest.raises(ValueError, match="at least one"):
        PerReplica([])


def test_select_replica_walks_structures():
    structure = {"a": PerReplica([1, 2]), "b": [PerReplica([3, 4]), 5], "c": SHARED}
    assert select_replica(0, structure) == {"a": 1, "b": [3, 5], "c": SHARED}
    assert select_replica(1, structure) == {"a": 2, "b": [4, 5], "c": SHARED}
    with pytest.raises(ValueError, match="2 components"):
        select_replica(2, structure)


def test_regroup_is_the_inverse():
    grouped = regroup([{"a": (1.5, SHARED)}, {"a": (2.5, SHARED)}])
    assert grouped["a"][0].values == (1.5, 2.5)
    assert grouped["a"][1] is SHARED
    assert [select_replica(i, grouped) for i in (0, 1)] == [
        {"a": (1.5, SHARED)},
        {"a": (2.5, SHARED)},
    ]


def test_numbers_are_wrapped_even_if_they_are_one_object():
    assert regroup([3, 3]).values == (3, 3)
    assert regroup([True, True]).values == (True, True)
    assert regroup([None, None]) is None
    assert regroup(["a", "a"]) == "a"


def test_one_replica_s_result_stays_what_it_is():
    result = [1, {"a": 2}]
    assert regroup([result]) is result
    assert regroup([5], always_wrap=True).values == (5,)
    assert regroup([None, None], always_wrap=True).values == (None, None)


@pytest.mark.parametrize(
    ("first", "second"),
    [([1], [1, 2]), ([1], (1,)), ({"a": 1}, {"b": 1}), ({"a": 1}, [1])],
)
def test_structures_that_differ(first, second):
    with pytest.raises(AssertionError, match=r"replica 0: .*, replica 1: "):
        regroup([first, second])


def test_a_mirrored_value_acts_as_its_component():
    value = Mirrored([np.array([1.0, 2.0]), np.array([1.0, 2.0])])
    assert (value + 1).tolist() == [2, 3]
    assert (1 - value).tolist() == [0, -1]
    assert (value * value).tolist() == [1, 4]
    assert (np.ones(2) + value).tolist() == [2, 3]
    assert value[1] == 2
    assert value.sum() == 3
    assert np.asarray(value).tolist() == [1, 2]
    assert float(Mirrored([np.float32(2)])) == 2
    assert (-Mirrored([torch.ones(1)])).tolist() == [-1]
    assert bool(Mirrored([torch.zeros(1)])) is False


def test_per_replica_values_convert_inside_run_only():
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
    value = PerReplica([np.array([1.0]), np.array([2.0])])
    own = strategy.run(lambda: np.asarray(value).tolist())
    assert strategy.experimental_local_results(own) == ([1.0], [2.0])
    with pytest.raises(ValueError, match=r"strategy\.reduce"):
        np.asarray(value)


@pytest.mark.parametrize("numbers", [(1, 1), (1, 2), (0.5, 0.5)])
def test_merge_call_and_run_treat_numbers_alike(numbers):
    """Whether two equal ones are one object is chance."""
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])

    def own():
        return numbers[ms.get_replica_context().replica_id_in_sync_group]

    def merged(strategy, number, *, nested):
        assert nested["number"].values == number.values == numbers
        assert nested["text"] == "same"
        return strategy.reduce("sum", number, axis=None)

    def step():
        nested = {"number": own(), "text": "same"}
        return ms.get_replica_context().merge_call(merged, (own(),), {"nested": nested})

    assert strategy.run(step).values == (sum(numbers),) * 2
    assert strategy.run(own).values == numbers
