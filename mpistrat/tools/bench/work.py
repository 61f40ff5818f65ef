"""The training step that all contestants take, in plain torch and with mpistrat."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.strategy import Strategy
from mpistrat.tools.bench.models.model import Model

Step = Callable[[], torch.Tensor]  # returns this rank's loss
# In its first steps a strategy tries how gradients travel best (`CommunicationOptions.overlap`).
STEPS_OF_TRIALS = 20


class Work:
    """One rank's part of a training step: SGD on a batch.

    Attributes:
        batch: inputs and targets of the next step, on `device`.
    """

    def __init__(self, model: Model, examples: int, rank: int, device: str = "cpu") -> None:
        self.model, self.examples, self.device = model, examples, device
        self.take(model.synthetic_batch(examples, seed=rank))

    def take(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        inputs, targets = batch
        self.batch = (inputs.to(self.device), targets.to(self.device))

    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The module and its optimizer: the same weights on each rank and for each contestant."""
        torch.manual_seed(0)
        module = self.model.build().to(self.device)
        return module, torch.optim.SGD(module.parameters(), lr=0.01)

    def loss(self, module: torch.nn.Module) -> torch.Tensor:
        inputs, targets = self.batch
        return functional.cross_entropy(module(inputs), targets)


def step_of(work: Work, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop's body, as everybody writes it."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(module)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def alone(work: Work) -> Step:
    """The step of a rank without communication."""
    return step_of(work, *work.build())


def with_strategy(work: Work, strategy: Strategy) -> tuple[Step, torch.nn.Module]:
    with strategy.scope():
        module, optimizer = work.build()
    step = step_of(work, module, optimizer)
    return lambda: strategy.run(step), module


def with_mpistrat(work: Work, options: Any = None, **more: Any) -> Step:
    """`options`, `more`: communication options and other arguments of the strategy."""
    return past_trials(
        work,
        MultiWorkerMirroredStrategy(None, options, devices=[work.device], gradients="mean", **more),
    )


def past_trials(work: Work, strategy: Strategy) -> Step:
    """A step with first weights, after the strategy has tried how gradients travel best."""
    step, module = with_strategy(work, strategy)
    first = copy.deepcopy(module.state_dict())
    for _ in range(STEPS_OF_TRIALS):
        step()
    module.load_state_dict(first)
    return step
