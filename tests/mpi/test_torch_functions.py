"""torch's functions take variables of several ranks: copies, one copy for a node, arrays on servers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.compat.v1 import ParameterServerStrategy
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from support.parameter_servers.remote_jobs import strategy_on_servers

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ON_READ, MEAN = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.MEAN
CPUS = ["cpu:0", "cpu:1"]
MATRIX, X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
PRODUCT = X @ MATRIX.T


def variable(strategy: Any, value: Any = MATRIX, **keywords: Any) -> Any:
    with strategy.scope():
        return ms.Variable(value, **keywords)


def linear(v: Any, x: torch.Tensor = X) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight=v) + 0 * torch.stack([v, v]).sum()


def assert_used(strategy: Any, v: Any) -> None:
    """In and outside run, by value and with autograd."""
    x = X.clone().requires_grad_()
    gradients = lambda: torch.autograd.grad(linear(v, x).sum(), x)[0]  # noqa: E731
    for call, expected in ((lambda: linear(v), PRODUCT), (gradients, MATRIX.sum(0)[None])):
        assert torch.equal(call(), expected)
        own = strategy.experimental_local_results(strategy.run(call))
        assert [torch.equal(value, expected) for value in own] == [True] * len(own)
    with pytest.raises(TypeError, match="would write to variable"):
        torch.add(MATRIX, MATRIX, out=v)
    assert (v == MATRIX).all()
    assert (v != MATRIX).sum() == 0
    assert [x.tolist() for x in divmod(v, 3)] == [[[0, 0], [1, 1]], [[1, 2], [0, 1]]]
    assert v.ndim == 2
    assert v in {v}
    with pytest.raises(RuntimeError, match="assign_sub"):
        v -= MATRIX
    assert v.name in repr(v)


@pytest.mark.parametrize("devices", [CPUS[:1], CPUS], ids=["k=1", "k=2"])
@pytest.mark.parametrize("kind", [ms.MultiWorkerMirroredStrategy, ms.CentralStorageStrategy])
def test_variables_that_replicas_keep(kind: Any, devices: list[str]) -> None:
    strategy = kind(devices) if kind is ms.CentralStorageStrategy else kind(devices=devices)
    assert_used(strategy, variable(strategy))
    of_numpy = variable(strategy, MATRIX.numpy(), aggregation=ms.VariableAggregation.SUM)
    with pytest.raises(TypeError, match="holds an array of numpy"):
        strategy.run(lambda: linear(of_numpy))
    assert torch.equal(linear(torch.as_tensor(of_numpy)), PRODUCT)


def test_copies_that_are_combined_when_they_are_read() -> None:
    strategy = ms.MultiWorkerMirroredStrategy()
    v = variable(strategy, synchronization=ON_READ, aggregation=MEAN)
    strategy.run(lambda: v.assign_add(torch.full((2, 2), float(RANK))))
    assert torch.equal(strategy.run(lambda: torch.mul(v, 1)), MATRIX + RANK)
    assert torch.equal(torch.mul(v, 1), MATRIX + (SIZE - 1) / 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("devices", [CPUS[:1], CPUS], ids=["k=1", "k=2"])
def test_variables_on_servers(devices: list[str], shards: int) -> None:
    with strategy_on_servers(
        lambda: ParameterServerStrategy(
            num_ps=1, variable_partitioner=FixedShardsPartitioner(shards), devices=devices
        )
    ) as strategy:
        if strategy is not None:
            assert_used(strategy, variable(strategy))


def on_chief(program: Callable[[Any, ClusterCoordinator], None]) -> None:
    try:
        strategy = ms.ParameterServerStrategy(num_ps=1)
    except SystemExit:
        return
    try:
        program(strategy, ClusterCoordinator(strategy))
    finally:
        strategy.shutdown()


@pytest.mark.mpi(min_size=3)
def test_variables_in_scheduled_functions() -> None:
    def program(strategy: Any, coordinator: ClusterCoordinator) -> None:
        v = variable(strategy)
        value = coordinator.schedule(lambda v: torch.nn.functional.linear(X, v), args=(v,))
        assert torch.equal(value.get(), PRODUCT)
        assert torch.equal(linear(v), PRODUCT)
        for use in (lambda: torch.mul(value, 2), lambda: np.asarray(value)):
            with pytest.raises(ValueError, match=r"<RemoteValue of .* is not an array: take .*get"):
                use()

    on_chief(program)
