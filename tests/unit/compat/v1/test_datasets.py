"""Inputs of mpistrat.compat.v1, beyond what is recorded of TensorFlow's."""

import itertools

import numpy as np
import pytest

from mpistrat.compat import v1
from mpistrat.errors import OutOfRangeError
from mpistrat.input import BatchedDataset

DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture
def pair():
    return v1.MirroredStrategy(DEVICES)


def results(strategy, iterator):
    """What each replica gets of each step, to the end."""
    found = []
    while True:
        try:
            batch = strategy.experimental_run(lambda x: x, iterator)
        except OutOfRangeError:
            return found
        parts = strategy.experimental_local_results(batch)
        found.append(tuple(np.asarray(part).tolist() for part in parts))


def test_an_iterator_begins_again(pair):
    iterator = pair.make_dataset_iterator([np.arange(3), np.arange(1)])
    iterator.initialize()
    assert results(pair, iterator) == [([0, 1], [2]), ([0], [])]
    iterator.initialize()
    assert results(pair, iterator) == [([0, 1], [2]), ([0], [])]


def test_a_function_of_batches_may_end(pair):
    def input_fn(context):
        batches = iter([np.arange(1), np.arange(2), np.arange(3)])

        def next_batch():
            for batch in batches:
                return batch
            raise OutOfRangeError("no more")

        return next_batch

    # The third batch does not fill a step.
    assert results(pair, pair.make_input_fn_iterator(input_fn)) == [([0], [0, 1])]


def test_an_input_function_makes_a_dataset_or_a_function(pair):
    with pytest.raises(ValueError, match="must return a dataset"):
        pair.make_input_fn_iterator(lambda context: 5)


def test_a_dataset_of_arrays_is_batched_and_distributed(pair):
    columns = {"x": np.arange(6.0).reshape(3, 2), "y": (np.arange(3),)}
    dataset = pair.experimental_make_numpy_dataset(columns)
    assert len(dataset) == 3
    (_, last) = pair.experimental_distribute_dataset(BatchedDataset(dataset, 2))
    first, second = pair.experimental_local_results(last)
    assert first["x"].tolist() == [[4, 5]]
    assert first["y"][0].tolist() == [2]
    assert second["x"].shape == (0, 2)


def test_a_list_of_arrays_is_an_array(pair):
    dataset = pair.experimental_make_numpy_dataset([np.arange(3), np.arange(3, 6)])
    assert [example.tolist() for example in dataset] == [[0, 1, 2], [3, 4, 5]]
    nested = pair.experimental_make_numpy_dataset(([1, 2], np.ones(2)))
    assert [(int(x), float(y)) for x, y in nested] == [(1, 1.0), (2, 1.0)]


def test_arrays_of_a_dataset_are_equally_long(pair):
    for columns in ((np.ones(2), np.ones(3)), np.float32(1), ()):
        with pytest.raises(ValueError, match="equal first dimensions"):
            pair.experimental_make_numpy_dataset(columns)


def test_arrays_are_given_outside_run(pair):
    with pytest.raises(RuntimeError, match="inside run"):
        pair.run(lambda: pair.experimental_make_numpy_dataset(np.ones(2)))


def test_the_default_strategy_has_inputs_too():
    default = v1.get_strategy()
    batches = [np.arange(3), np.arange(2)]
    assert default.experimental_distribute_dataset(batches) is batches
    assert default.distribute_datasets_from_function(lambda context: batches) is batches
    assert results(default, default.make_dataset_iterator(batches)) == [([0, 1, 2],), ([0, 1],)]
    counter = itertools.count()
    iterator = default.make_input_fn_iterator(lambda context: lambda: np.asarray(next(counter)))
    assert [int(iterator.get_next()) for _ in range(3)] == [0, 1, 2]


def test_the_default_strategy_shards():
    """Its replicas are those of the strategy outside every scope."""
    default, whole = v1.get_strategy(), np.arange(3)
    assert default.shard(whole).tolist() == [0, 1, 2]
    with default.scope():
        assert default.shard(whole).tolist() == [0, 1, 2]
    assert default.run(lambda: default.shard(whole)).tolist() == [0, 1, 2]
    with default.replica():
        assert default.shard(whole).tolist() == [0, 1, 2]
