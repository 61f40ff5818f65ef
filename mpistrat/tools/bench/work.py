"""The training step that all contestants take, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from mpistrat.tools.bench.models import Model

Step = Callable[[], torch.Tensor]  # returns this rank's loss


class Work:
    """One rank's part of a training step: SGD on a batch of `examples` examples.

    The batch is random, and different on each rank, until `take` replaces it.

    Attributes:
        batch: inputs and targets of the next step, on `device`.
    """

    def __init__(self, model: Model, examples: int, rank: int, device: str = "cpu") -> None:
        self.model = model
        self.examples = examples
        self.device = device
        self.take(model.synthetic_batch(examples, seed=rank))

    def take(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        inputs, targets = batch
        self.batch = (inputs.to(self.device), targets.to(self.device))

    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return a new module and its optimizer, with the same weights on each rank and for each contestant."""
        torch.manual_seed(0)
        module = self.model.build().to(self.device)
        return module, torch.optim.SGD(module.parameters(), lr=0.01)

    def loss(self, module: torch.nn.Module) -> torch.Tensor:
        inputs, targets = self.batch
        return functional.cross_entropy(module(inputs), targets)


def step_of(work: Work, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a function that takes one training step with `work`'s batch, and returns this rank's detached loss."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(module)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def alone(work: Work) -> Step:
    """Return a training step of this rank alone, without communication. Every call of `alone` builds a new module."""
    return step_of(work, *work.build())
