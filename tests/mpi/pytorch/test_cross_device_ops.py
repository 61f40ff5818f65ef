"""A policy of the program's own sees the gradients of `backward()`, as it sees the values of `reduce`."""

import contextlib

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from support.rank_errors import errors_of_ranks

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1
several = pytest.mark.skipif(SIZE == 1, reason="needs 2 MPI ranks or more")
DEVICES = {1: None, 2: ["cpu:0", "cpu:1"]}


class Counting(ms.ReductionToOneDevice):
    """Keeps what it was given: for each call, how many components each value has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        assert reduce_op is ms.ReduceOp.SUM
        self.calls.append([len(value.values) for value, _ in value_destination_pairs])
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)


class Trained:
    """A model after some steps, with and without a policy of its own."""

    def __init__(self, replicas, ops, rule="sum", **options) -> None:
        self.strategy = ms.MirroredStrategy(
            DEVICES[replicas], cross_device_ops=ops, gradients=rule, **options
        )
        with self.strategy.scope():
            torch.manual_seed(3)
            self.model = torch.nn.Sequential(
                torch.nn.Linear(5, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2)
            ).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def train(self, steps=3):
        def step():
            self.optimizer.zero_grad()
            replica = ms.get_replica_context().replica_id_in_sync_group
            examples = torch.randn(4, 5, generator=torch.Generator().manual_seed(replica))
            self.model(examples.double()).square().mean().backward()
            self.optimizer.step()

        for _ in range(steps):
            self.strategy.run(step)
        return self

    def values(self):
        return [p.detach().clone() for p in self.model.state_dict().values()]


@pytest.mark.parametrize("rule", ["sum", "mean"])
@pytest.mark.parametrize("replicas", DEVICES)
def test_it_is_called_once_in_each_backward(replicas, rule):
    ops = Counting()
    with_ops = Trained(replicas, ops, rule).train()
    expected = [[replicas] * 6] * 3 if replicas * SIZE > 1 else []
    # Two replicas of a rank call backward() together.
    assert ops.calls == expected
    for own, other in zip(
        with_ops.values(), Trained(replicas, None, rule).train().values(), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


class Doubling(ms.ReductionToOneDevice):
    def batch_reduce_implementation(self, *args):
        return [2 * value for value in super().batch_reduce_implementation(*args)]


@pytest.mark.parametrize("replicas", DEVICES)
def test_what_it_makes_of_them_counts(replicas):
    if replicas * SIZE == 1:
        pytest.skip("needs 2 MPI ranks or more, or two replicas: one has nothing to reduce")
    strategy = ms.MirroredStrategy(DEVICES[replicas], cross_device_ops=Doubling(), gradients="sum")
    with strategy.scope():
        model = torch.nn.Linear(2, 1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        return model.weight.grad

    assert strategy.experimental_local_results(strategy.run(step))[0].tolist() == [
        [2.0 * replicas * SIZE] * 2
    ]


@several
@pytest.mark.parametrize("sparse", [False, True])
def test_parameters_that_only_some_replicas_use(sparse):
    ops = Counting()
    strategy = ms.MirroredStrategy(DEVICES[2], cross_device_ops=ops, gradients="sum")
    with strategy.scope():
        table = torch.nn.Embedding(6, 2, sparse=sparse)
        other = torch.nn.Linear(2, 1)

    def step():
        replica = ms.get_replica_context().replica_id_in_sync_group
        rows = table(torch.tensor([replica % 3, 5]))
        loss = rows.sum() if replica % 2 else other(rows).sum()
        loss.backward()
        return table.weight.grad.to_dense(), other.bias.grad

    grads = strategy.experimental_local_results(strategy.run(step))
    rows = np.zeros((6, 2))
    weight = other.weight.detach().numpy()[0]
    for replica in range(2 * SIZE):
        for row in (replica % 3, 5):
            rows[row] += 1 if replica % 2 else weight
    for table_grad, bias_grad in grads:
        np.testing.assert_allclose(table_grad, rows, rtol=1e-6)
        assert bias_grad.tolist() == [2.0 * SIZE]
    assert ops.calls == [[2, 2, 2]]


@several
def test_its_error_is_raised_on_all_ranks():
    class Failing(ms.ReductionToOneDevice):
        def batch_reduce_implementation(self, *args):
            if RANK == LAST:
                raise KeyError("of the policy")
            return super().batch_reduce_implementation(*args)

    strategy = ms.MirroredStrategy(cross_device_ops=Failing(), gradients="sum")
    with strategy.scope():
        model = torch.nn.Linear(2, 1)

    def step():
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())

    for rank, (name, text, _) in enumerate(errors_of_ranks(step)):
        assert name in ("CollectiveMismatchError", "KeyError"), rank
        assert "of the policy" in text


@several
def test_with_shared_parameters_it_sees_them_too():
    ops = Counting()
    shared = Trained(1, ops, shared_parameters=True).train()
    assert ops.calls == [[1] * 6] * 3
    for own, other in zip(shared.values(), Trained(1, None).train().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


@several
def test_gradients_do_not_leave_before_it_has_seen_them():
    options = ms.CommunicationOptions(overlap=True)
    with (
        pytest.warns(RuntimeWarning, match="cross_device_ops")
        if RANK == 0
        else contextlib.nullcontext()
    ):
        overlapped = Trained(1, Counting(), communication_options=options)
        overlapped.train()
    assert "cross_device_ops of the program's own" in overlapped.strategy.extended.explain()
