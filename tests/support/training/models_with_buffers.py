"""Models as programs have them, for what is done to whole modules. This file imports nothing of mpistrat."""

from collections.abc import Callable
from typing import Any

import torch


class Net(torch.nn.Module):
    """Batch norm, a buffer that is not saved in `state_dict`, and a parameter and a module that are there twice."""

    pos: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.second = torch.nn.Linear(8, 8)
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.again = self.second
        self.register_buffer("pos", torch.arange(8.0), persistent=False)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.norm(self.first(x))
        hidden = torch.relu(first) + self.pos
        second = self.tied(self.second(hidden))
        output: torch.Tensor = self.last(self.again(second))
        return output


def lazy_net() -> torch.nn.Module:
    """It knows its shapes after the first forward."""
    return torch.nn.Sequential(
        torch.nn.LazyLinear(8), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(2)
    )


def trained(
    strategy: Any, make: Callable[[], torch.nn.Module]
) -> tuple[Any, torch.optim.Optimizer]:
    """A model after three steps, the last of which may overlap, and its optimizer."""
    torch.manual_seed(0)
    with strategy.scope():
        model = make()
    x = torch.randn(6, 4)
    strategy.run(lambda: model(x))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    return model, optimizer
