"""Gradients and values between ranks by XLA's own sums, for which a sum over MPI of copies on the host stands in here.

On the CPU device XLA does not connect processes; on a TPU it does, and nothing is cut in two.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

import mpistrat as ms
from mpistrat import xla
from mpistrat.communicators.node.common_memory import PAGE
from support.xla.trained_models import Training

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


@pytest.fixture
def comm() -> MPI.Intracomm:
    from mpi4py import MPI  # beside this file, tests run where there is no MPI to be loaded

    return MPI.COMM_WORLD


@pytest.fixture
def connected(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> ms.TPUStrategy:
    """A strategy that has seen XLA's sums to be right, over a communicator of its own: that is for good."""
    from mpi4py import MPI

    runtime = xla.start()
    operations = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}

    def over_mpi(op: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        summed = []
        for tensor in tensors:
            (host,) = runtime.fetch([tensor.detach()])
            comm.Allreduce(MPI.IN_PLACE, host.numpy(), operations[op])
            summed += runtime.put([host], tensor.device)
        return summed

    monkeypatch.setattr(runtime, "all_reduce", over_mpi)
    monkeypatch.setattr(runtime, "num_all_devices", comm.size)
    strategy = ms.TPUStrategy(gradients="sum", comm=comm.Dup())
    assert ("by XLA's collectives" in strategy.extended.explain()) == (comm.size > 1)
    return strategy


def test_training_is_that_of_sums_through_the_host(
    connected: ms.TPUStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(connected, "adam")
    losses = training.run()
    monkeypatch.undo()
    through_host = Training(ms.TPUStrategy(gradients="sum"), "adam")
    assert "by XLA's collectives" not in through_host.strategy.extended.explain()
    assert losses == through_host.run()
    assert training.state() == through_host.state()


def test_values_of_all_dtypes_and_forms(connected: ms.TPUStrategy, comm: MPI.Intracomm) -> None:
    ranks = range(comm.size)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        context = ms.get_replica_context()
        return [
            context.all_reduce("sum", x),
            context.all_reduce("mean", x),
            context.all_reduce("sum", x.bfloat16()).float(),
            context.all_reduce("sum", x.long()),
            context.all_gather(x, 0),
            *(context.all_reduce(op, x) for op in ("max", "min", "product")),
        ]

    operand = torch.tensor([comm.rank + 1.0, 2.0], device="xla:0")
    total, mean, half, whole, gathered, largest, least, product = (
        value.tolist() for value in connected.run(step, args=(operand,))
    )
    expected = [sum(rank + 1.0 for rank in ranks), 2.0 * comm.size]
    assert total == half == whole == expected
    assert mean == [value / comm.size for value in expected]
    assert gathered == [value for rank in ranks for value in (rank + 1.0, 2.0)]
    assert (largest, least) == ([comm.size, 2.0], [1.0, 2.0])
    assert product == [math.factorial(comm.size), 2.0**comm.size]


def test_what_xla_is_not_asked_for(connected: ms.TPUStrategy, comm: MPI.Intracomm) -> None:
    """Products, bits, and rows that go to other ranks: they go through the host."""
    communicator, size = connected.extended.communicator, comm.size
    product = torch.full((2,), 2.0, device="xla:0")
    communicator.all_reduce(product, "prod")
    assert product.tolist() == [2.0**size] * 2
    bits = torch.tensor([1 << comm.rank], device="xla:0")
    communicator.all_reduce(bits, "bor")
    assert bits.tolist() == [2**size - 1]
    whole = torch.zeros(2 * size, device="xla:0")
    mine = torch.full((2,), float(comm.rank), device="xla:0")
    communicator.all_gather_into(mine, whole)
    assert whole.tolist() == [float(rank) for rank in range(size) for _ in range(2)]
    exchanged = torch.zeros(2 * size, device="xla:0")
    communicator.all_to_all(whole + comm.rank * 10, exchanged, [2] * size, [2] * size)
    assert exchanged.tolist() == [comm.rank + 10.0 * rank for rank in range(size) for _ in range(2)]


def test_memory_that_ranks_share_goes_on_being_shared(
    connected: ms.TPUStrategy, comm: MPI.Intracomm
) -> None:
    """The communicator is that of other strategies, too."""
    ordinary = ms.MultiWorkerMirroredStrategy(gradients="sum").extended.communicator
    kinds = {
        type(communicator.memory.common_memory(PAGE)[0])
        for communicator in (connected.extended.communicator, ordinary)
    }
    assert len(kinds) == 1
    assert (kinds == {type(None)}) == (comm.size == 1)


def test_one_rank_alone_reads_results(connected: ms.TPUStrategy) -> None:
    """It starts no graph then."""
    runtime, metrics = xla.start(), importlib.import_module("torch_xla.debug.metrics")
    with connected.scope():
        variable = ms.Variable(
            torch.zeros(3),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.MEAN,
        )
    variable.assign([1.0, 2.0, 3.0])
    operand = torch.ones(2, 3, device="xla:0") + connected.rank
    results = [
        connected.gather(operand * 2, 0),
        connected.reduce("mean", operand + 1, axis=None),
        connected.reduce("mean", operand + 2, axis=0),
        *connected.reduce("max", [operand + 3, operand[0] + 4], axis=None),
        connected.extended.reduce_to("mean", operand + 5, "xla:0"),
        variable.read_value(),
    ]
    assert not any(runtime.are_pending(results))
    runtime.wait()
    before = metrics.metric_data("ExecuteTime")[0]
    if connected.is_first:
        connected.print([result.tolist() for result in results])
    assert metrics.metric_data("ExecuteTime")[0] == before
