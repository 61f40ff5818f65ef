"""Derivatives of derivatives, through what communicates: they are those of one process that computes all replicas."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpistrat as ms
from support.training.whole_batch import Pair, in_run, replica_id

Combine = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[1, 2], ids=["k1", "k2"])
def strategy(request: pytest.FixtureRequest) -> ms.Strategy:
    devices = [f"cpu:{i}" for i in range(request.param)]
    return ms.MultiWorkerMirroredStrategy(devices=devices, gradients="sum")


def norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As torch's batch norm, whose third derivative is not right."""
    variance, mean = torch.var_mean(x, 0, correction=0)
    return (x - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias


def own_input(replica: int, kind: str) -> torch.Tensor:
    """Replicas of a gather, and of a batch norm, have other numbers of rows, down to none."""
    rows = 2 if kind in ("sum", "mean", "complex") else (4, 0, 3)[replica % 3]
    dtype = torch.complex128 if kind == "complex" else torch.float64
    x = torch.randn(rows, 3, dtype=dtype, generator=torch.Generator().manual_seed(replica))
    return x.requires_grad_()


def combined_here(kind: str, layer: Any, x: torch.Tensor) -> Any:
    context = ms.get_replica_context()
    assert context is not None
    if kind == "batch norm":
        return layer(x)
    if kind == "gather":
        return context.all_gather(x.sin(), axis=0)
    if kind == "gather columns":
        return context.all_gather(x.sin().t(), axis=-1)
    return context.all_reduce("mean" if kind == "mean" else "sum", {"of": x**2})["of"]


def combined_by_one(kind: str, layer: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each of the replicas has."""
    if kind == "batch norm":
        return list(norm(layer, torch.cat(xs)).split([len(x) for x in xs]))
    if kind.startswith("gather"):
        whole = torch.cat([x.sin() for x in xs])
        return [whole if kind == "gather" else whole.t()] * len(xs)
    total = torch.stack([x**2 for x in xs]).sum(0)
    return [total / len(xs) if kind == "mean" else total] * len(xs)


def loss_of(value: torch.Tensor, replica: int) -> torch.Tensor:
    """Of another weight on each replica."""
    real = torch.view_as_real(value) if value.is_complex() else value
    return (real**3).sum() * (replica + 1)


def square(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.abs().square().sum()


@pytest.mark.parametrize(
    "kind", ["sum", "mean", "complex", "gather", "gather columns", "batch norm"]
)
def test_derivatives_of_all_orders(strategy: ms.Strategy, kind: str) -> None:
    """The derivative of all replicas' losses, of the squares of all those derivatives, and so on."""
    orders = (
        2 if strategy.num_replicas_in_sync == 1 else 3
    )  # the batch norm of one replica is torch's
    layer = torch.nn.SyncBatchNorm(3).double()
    torch.nn.init.constant_(layer.weight, 1.5)

    def derivatives() -> Iterator[torch.Tensor]:
        x = own_input(replica_id(), kind)
        loss = loss_of(combined_here(kind, layer, x), replica_id())
        for _ in range(orders):
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            yield gradient.detach()
            loss = square(gradient)

    xs = [own_input(replica, kind) for replica in range(strategy.num_replicas_in_sync)]
    values = combined_by_one(kind, layer, xs)
    total: Any = sum(loss_of(value, replica) for replica, value in enumerate(values))
    expected = []
    for _ in range(orders):
        gradients = torch.autograd.grad(total, xs, create_graph=True)
        expected.append(gradients)
        total = sum(square(gradient) for gradient in gradients)

    def check() -> None:
        for ours, theirs in zip(derivatives(), expected, strict=True):
            mine, scale = theirs[replica_id()], max(square(their) for their in theirs).sqrt()
            assert (ours - mine).abs().le(1e-9 * scale).all()

    strategy.run(check)


def test_a_penalty_trains_as_in_one_process(strategy: ms.Strategy) -> None:
    """The slope of a loss of all outputs is part of the loss."""
    pair = Pair(strategy)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        output = model(x)
        everyone, count = output, 1
        if in_run():
            context = ms.get_replica_context()
            assert context is not None
            everyone, count = context.all_gather(output, axis=0), strategy.num_replicas_in_sync
        loss = (everyone @ everyone.t()).square().mean() / count
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        (loss + 50 * slope.square().sum()).backward()
        optimizer.step()

    pair.train(step)


@pytest.mark.mpi(min_size=2)
def test_replicas_that_differentiate_unequally_often() -> None:
    """The loss of all but the first replica has no second derivative: the next collective is another one."""
    strategy = ms.MultiWorkerMirroredStrategy()

    def step() -> None:
        context = ms.get_replica_context()
        assert context is not None
        x = torch.ones(2, requires_grad=True)
        total = context.all_reduce("sum", x**2)
        loss = (total**3 if replica_id() == 0 else total).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(gradient.square().sum(), x)
        context.all_reduce("sum", torch.ones(2))

    with pytest.raises(
        ms.errors.CollectiveMismatchError, match="gradient of gradient of all_reduce"
    ):
        strategy.run(step)
