"""torch's functions take variables and distributed values where they take tensors."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import mpistrat as ms
from mpistrat.values import DistributedValues, Mirrored, PerReplica

ON_READ, SUM = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.SUM
CPUS = ["cpu:0", "cpu:1"]
STRATEGIES = {
    "one device": lambda: ms.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: ms.MirroredStrategy(CPUS),
    "central": lambda: ms.CentralStorageStrategy(CPUS),
    "parameter server": lambda: ms.compat.v1.ParameterServerStrategy(),
}
MATRIX, X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
CALLS = {
    "linear": lambda v, x: functional.linear(x, v),
    "keywords": lambda v, x: functional.linear(input=x, weight=v, bias=None),
    "matmul": lambda v, x: torch.matmul(v, x.T),
    "list": lambda v, x: torch.stack([v[0], x[0]]) + torch.stack([x[0], v[0]]),
    "tuple": lambda v, x: torch.cat((x, v)),
    "list as keyword": lambda v, x: torch.cat(tensors=[v, x], dim=0),
    "two": lambda v, x: torch.mul(v, v),
    "operator": lambda v, x: x @ v,
    "compared": lambda v, x: v == torch.full((2, 2), 2.0),
    "into a tensor": lambda v, x: torch.zeros(2, 2).add_(v),
    "part of a tensor": lambda v, x: torch.zeros(3, 2).index_put_((torch.tensor([0, 2]),), v),
    "einsum": lambda v, x: torch.einsum("ij,kj->ik", v, x),
    "converted": lambda v, x: torch.as_tensor(v) @ torch.asarray(v),
    "size": lambda v, x: torch.ones_like(v).view(torch.Size([4])),
}


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(scope="module")
def pair():
    return ms.MirroredStrategy(CPUS)


def variable(strategy, value, **keywords):
    with strategy.scope():
        return ms.Variable(value, **keywords)


def replica():
    return ms.get_replica_context().replica_id_in_sync_group


def results(strategy, fn):
    """Of each replica of `strategy`."""
    return strategy.experimental_local_results(strategy.run(fn))


@pytest.mark.parametrize("call", CALLS)
def test_every_strategy_s_variables(strategy, call):
    v = variable(strategy, MATRIX)
    expected = CALLS[call](MATRIX, X)
    assert torch.equal(CALLS[call](v, X), expected)
    assert all(torch.equal(own, expected) for own in results(strategy, lambda: CALLS[call](v, X)))


@pytest.mark.parametrize("call", CALLS)
def test_shards(call):
    shards = [variable(ms.OneDeviceStrategy("cpu:0"), row[None]) for row in MATRIX]
    v = ms.ShardedVariable(shards)
    assert torch.equal(CALLS[call](v, X), CALLS[call](MATRIX, X))


def test_each_replica_s_own_copy(pair):
    v = variable(pair, torch.zeros(2), synchronization=ON_READ, aggregation=SUM)
    pair.run(lambda: v.assign(torch.full((2,), replica() + 1.0)))
    assert [r.tolist() for r in results(pair, lambda: torch.mul(v, 2))] == [[2, 2], [4, 4]]
    assert torch.mul(v, 2).tolist() == [6, 6]
    alone = variable(pair, torch.zeros(2), synchronization=ON_READ)
    with pytest.raises(ValueError, match="ON_READ with aggregation NONE"):
        torch.mul(alone, 2)


@pytest.mark.parametrize("kind", [PerReplica, DistributedValues, Mirrored])
def test_distributed_values(pair, kind):
    value = kind([torch.tensor([1.0]), torch.tensor([2.0])])
    for call in (
        lambda: torch.mul(value, 2),
        lambda: torch.ones(1) * 2 * value,
        lambda: torch.as_tensor(value) * 2,
        lambda: torch.cat([value, value])[:1] * 2,
    ):
        assert [r.tolist() for r in results(pair, call)] == [[2], [4]]
        if kind is Mirrored:
            assert call().tolist() == [2]
        else:
            with pytest.raises(ValueError, match=r"no single value outside run; use strategy\.red"):
                call()


def test_components_that_are_numbers(pair):
    value = PerReplica([3, 4.0])
    assert [r.tolist() for r in results(pair, lambda: torch.ones(1) * value)] == [[3], [4]]
    assert [r.tolist() for r in results(pair, lambda: torch.as_tensor(value))] == [3, 4]


def test_on_each_copy(pair):
    v = variable(pair, torch.zeros(1))
    values = PerReplica([torch.tensor([1.0]), torch.tensor([2.0])])
    assert pair.extended.update(v, lambda _: torch.mul(values, 2), group=False) == (2, 4)
    with pytest.raises(ValueError, match="2 components"):
        ms.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).run(lambda: torch.mul(values, 2))


def test_another_strategy_s_variable(pair):
    v = variable(pair, torch.zeros(1))
    with pytest.raises(RuntimeError, match="strategies must not be mixed"):
        ms.OneDeviceStrategy("cpu:0").run(lambda: torch.mul(v, 2))


def test_gradients_flow_as_with_operators(strategy):
    v = variable(strategy, MATRIX)
    inputs = X.clone().requires_grad_()
    for call in (lambda x: functional.linear(x, v), lambda x: torch.matmul(v, x.T)):
        (gradient,) = torch.autograd.grad(call(inputs).sum(), inputs)
        assert gradient.tolist() == ([[4, 6]])

    def gradients(product):
        weight = v.read_value().requires_grad_()
        read = v.read_value()  # of servers it is another copy
        if read is not weight:
            return None
        (gradient,) = torch.autograd.grad(product(v, X.T).sum(), [v])
        assert weight.grad is None
        product(v, X.T).sum().backward()
        (own, weight.grad) = weight.grad, None
        assert torch.equal(own, gradient)
        return own.tolist()

    assert gradients(torch.matmul) == gradients(lambda a, b: a @ b)
    assert gradients(torch.matmul) in ([[5, 6], [5, 6]], None)


@pytest.mark.parametrize("inside", [True, False])
def test_variables_of_numpy_say_so(strategy, inside):
    v = variable(strategy, MATRIX.numpy(), name="weights")
    call = lambda: functional.linear(X, v)  # noqa: E731
    with pytest.raises(
        TypeError,
        match=r"torch's linear takes tensors, and variable 'weights' holds an array of numpy, float32\[2,2\]",
    ):
        strategy.run(call) if inside else call()
    assert torch.equal(functional.linear(X, torch.as_tensor(v)), X @ MATRIX.T)
    counter = variable(strategy, 0)
    counter.assign_add(1)
    with pytest.raises(TypeError, match="holds an array of numpy"):
        torch.mul(X, counter)
    assert torch.equal(torch.as_tensor(counter), torch.tensor(1))


def test_components_of_numpy_say_so(pair):
    value = PerReplica([np.ones(1), np.ones(1)])
    with pytest.raises(TypeError, match="a PerReplica holds an array of numpy"):
        pair.run(lambda: torch.mul(value, 2))


WRITES = {
    "out": lambda v: torch.add(X, X, out=v),
    "one of several out": lambda v: torch.max(X, 1, out=(torch.zeros(1), v)),
    "in place": lambda v: functional.relu(v, inplace=True),
    "by its name": lambda v: torch.relu_(v),
    "first values": lambda v: torch.nn.init.uniform_(v),
    "in a list": lambda v: torch._foreach_add_([v], 1.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_on_one_replica_alone(strategy, write):
    v = variable(strategy, torch.tensor([[-1.0, -2.0]]), name="weights")
    for call in (lambda: WRITES[write](v), lambda: strategy.run(lambda: WRITES[write](v))):
        with pytest.raises(TypeError, match=r"would write to variable 'weights', on this .*assign"):
            call()
    assert v.numpy().tolist() == [[-1, -2]]


BESIDES = {
    "batch_norm": lambda v: functional.batch_norm(X, v, torch.ones(2), training=True),
    "instance_norm": lambda v: functional.instance_norm(X[None], None, v, use_input_stats=True),
    "embedding": lambda v: functional.embedding(torch.tensor([0]), v, max_norm=1.0),
    "embedding_bag": lambda v: functional.embedding_bag(torch.tensor([[0]]), v, max_norm=1.0),
}


@pytest.mark.parametrize("name", BESIDES)
def test_nothing_is_written_besides(strategy, name):
    v = variable(strategy, torch.full((2, 2), 3.0))
    with pytest.raises(TypeError, match=rf"torch's {name} would write to variable"):
        strategy.run(lambda: BESIDES[name](v))
    assert v.numpy().tolist() == [[3, 3], [3, 3]]


def test_what_may_write_and_does_not(pair):
    means = variable(pair, torch.zeros(2))
    evaluated = functional.batch_norm(X, means, torch.ones(2), eps=0.0)
    assert torch.equal(evaluated, X)
    table = variable(pair, MATRIX)
    assert torch.equal(functional.embedding(torch.tensor([1]), table), MATRIX[1:])


def test_inference_mode(pair):
    with torch.inference_mode():
        v = variable(pair, MATRIX)
        v.assign_add(MATRIX)
        assert torch.equal(torch.mul(v, 1), 2 * MATRIX)


def test_tensors_of_other_classes(pair):
    class Own(torch.Tensor):
        pass

    v = variable(pair, MATRIX)
    own = X.as_subclass(Own)
    assert isinstance(torch.matmul(own, v), Own)
    assert torch.equal(torch.matmul(torch.nn.Parameter(X), v), X @ MATRIX)


def test_compiled_functions_read_each_replica_s_copy(pair):
    v = variable(pair, torch.zeros(2))
    pair.run(lambda: v.assign(torch.full((2,), replica() + 1.0)))
    step = torch.compile(
        lambda x: torch.add(torch.stack([x, v]), 1).sum(), backend="eager", fullgraph=True
    )
    assert results(pair, lambda: step(torch.zeros(2)).item()) == (6, 8)
    assert step(torch.zeros(2)) == 6


def test_numpy_keeps_its_ways(pair):
    v = variable(pair, MATRIX)
    assert np.from_dlpack(v).tolist() == MATRIX.tolist()
    assert np.add(v, 1).tolist() == (MATRIX + 1).tolist()
    assert (v + 1).tolist() == (MATRIX + 1).tolist()
    assert v in {v: 1}
