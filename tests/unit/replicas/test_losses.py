"""Losses whose sum over the replicas is that of the whole batch."""

import numpy as np
import pytest
import torch

import mpistrat as ms


@pytest.fixture(params=[np.array, torch.tensor], ids=["numpy", "torch"])
def make(request):
    return request.param


def scaled(strategy, loss, *args, **kwargs):
    def replica():
        own = ms.get_replica_context().replica_id_in_sync_group
        return ms.compute_average_loss(loss(own), *args, **kwargs)

    return [float(value) for value in strategy.experimental_local_results(strategy.run(replica))]


def pair():
    return ms.MirroredStrategy(["cpu:0", "cpu:1"])


def test_the_global_batch_size_divides(make):
    values = scaled(pair(), lambda i: make([1.0, 2.0 + i]), global_batch_size=10)
    assert values == pytest.approx([0.3, 0.4])


def test_by_default_it_is_this_replica_s_times_the_replicas(make):
    assert scaled(pair(), lambda i: make([1.0, 3.0])) == [1, 1]


def test_by_default_it_is_that_of_the_step_which_the_loader_gave(make):
    """The last batch is short, and its parts differ: 3 and 2, then 1 and 0."""
    strategy = pair()
    distributed = strategy.experimental_distribute_dataset(
        [make([1.0, 2.0, 3.0, 4.0, 5.0]), make([7.0])]
    )
    losses = [strategy.run(ms.compute_average_loss, (x,)) for x in distributed]
    assert [float(strategy.reduce("sum", loss, axis=None)) for loss in losses] == [3, 7]
    with pytest.raises(ValueError, match="pass global_batch_size"):  # no step is under way
        scaled(strategy, lambda i: make([1.0] * i))


def test_losses_of_other_than_the_step_s_examples_are_as_many_on_all_replicas(make):
    strategy = pair()
    iterator = iter(strategy.experimental_distribute_dataset([make([1.0] * 5)]))
    next(iterator)
    assert scaled(strategy, lambda i: make([1.0] * (7 + i))) == [0.5, 0.5]
    assert scaled(strategy, lambda i: make([1.0] * (3 - i))) == pytest.approx([3 / 5, 2 / 5])


def test_weights_are_broadcast_from_the_left(make):
    values = scaled(
        pair(), lambda i: make([[1.0, 2.0], [3.0, 4.0]]), make([1.0, 10.0]), global_batch_size=1
    )
    assert values == [73, 73]


def test_an_empty_batch_adds_nothing(make):
    assert scaled(pair(), lambda i: make([1.0] * i), global_batch_size=1) == [0, 1]


def test_outside_every_strategy_there_is_one_replica(make):
    assert float(ms.compute_average_loss(make([1.0, 3.0]))) == 2
    assert float(ms.scale_regularization_loss(make([1.0, 3.0]))) == 4


def test_regularization_counts_once(make):
    strategy = pair()
    parts = strategy.run(lambda: ms.scale_regularization_loss(make([1.0, 3.0])))
    assert float(strategy.reduce("sum", parts, axis=None)) == 4
    assert float(ms.OneDeviceStrategy("cpu:0").run(lambda: ms.scale_regularization_loss(2))) == 2


def test_losses_stay_differentiable():
    x = torch.ones(2, requires_grad=True)
    ms.compute_average_loss(x * 3, global_batch_size=6).backward()
    assert x.grad.tolist() == [0.5, 0.5]
