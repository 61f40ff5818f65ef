"""The same training twice: on the replicas of a strategy, and by this process alone on the whole batch."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

import mpistrat as ms

BATCH = 13  # examples over all replicas; no number of replicas divides it
FEATURES = 4

Step = Callable[..., Any]


def batches(seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs [BATCH, FEATURES] and targets [BATCH, 2], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
        yield x, torch.randn(BATCH, 2, generator=generator, dtype=torch.float64)


def own(whole: torch.Tensor) -> torch.Tensor:
    """This replica's examples of a whole batch. Context: replica."""
    context = ms.get_replica_context()
    assert context is not None
    return whole.tensor_split(context.num_replicas_in_sync)[context.replica_id_in_sync_group]


def in_run() -> bool:
    return ms.has_strategy()


def replica_id() -> int:
    """This replica's number; 0 outside run, where one process stands for all."""
    context = ms.get_replica_context()
    assert context is not None
    return int(context.replica_id_in_sync_group)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """This replica's part of the mean squared error over the batch; all of it outside run."""
    return (output - target).square().sum() / BATCH


def small_net() -> torch.nn.Module:
    hidden = torch.nn.Linear(FEATURES, 5)
    output = torch.nn.Linear(5, 2)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), output)


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build(
    strategy: ms.Strategy, make: Callable[[], torch.nn.Module] = small_net
) -> torch.nn.Module:
    """`make()` in the scope, in float64, from a seed that differs between ranks."""
    torch.manual_seed(100 + strategy.extended.communicator.rank)
    with strategy.scope():
        return make().double()


class Pair:
    """A mirrored model and a copy of it, each with an optimizer of its own."""

    def __init__(
        self,
        strategy: ms.Strategy,
        make: Callable[[], torch.nn.Module] = small_net,
        optimizer: Callable[[Any], torch.optim.Optimizer] = momentum_sgd,
    ) -> None:
        self.strategy = strategy
        self.model = build(strategy, make)
        self.alone = copy.deepcopy(self.model)
        self.optimizer = optimizer(self.model.parameters())
        self.optimizer_alone = optimizer(self.alone.parameters())
        self.batches = batches()

    def step(self, step: Step) -> None:
        """`step(model, optimizer, x, y)` on each replica with its examples, and alone with all."""
        x, y = next(self.batches)

        def of_a_replica() -> Any:
            return step(self.model, self.optimizer, own(x), own(y))

        self.strategy.run(of_a_replica)
        step(self.alone, self.optimizer_alone, x, y)

    def check(self) -> None:
        assert_same_parameters(self.model, self.alone)

    def train(self, step: Step, steps: int = 3) -> None:
        """Several steps with a check after each."""
        for _ in range(steps):
            self.step(step)
            self.check()


def plain_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


def assert_same_parameters(
    model: torch.nn.Module, alone: torch.nn.Module, gradients: bool = True
) -> None:
    """Parameters and gradients are equal but for rounding; None where the other is None."""
    expected = dict(alone.named_parameters())
    torch.testing.assert_close(dict(model.named_parameters()), expected)
    if gradients:
        for name, parameter in model.named_parameters():
            assert_same_gradient(parameter.grad, expected[name].grad, name)


def assert_same_gradient(mine: torch.Tensor | None, other: torch.Tensor | None, name: str) -> None:
    assert (mine is None) == (other is None), f"gradient of {name}: {mine} and {other}"
    if mine is not None and other is not None:
        assert mine.layout == other.layout, f"gradient of {name}"
        both = {name: mine.to_dense()}, {name: other.to_dense()}
        torch.testing.assert_close(*both)


def equal_on_all_ranks(strategy: ms.Strategy, tensor: torch.Tensor) -> bool:
    everyone = strategy.extended.communicator.all_gather_object(tensor.detach())
    return all(torch.equal(everyone[0], other) for other in everyone)
