"""How many steps the optimizers of this process have made, of one rank's strategies, too."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer

from mpistrat.pytorch import hooks


class OptimizerSteps:
    """Attributes: count: of all optimizers, since this was asked for first."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.count += 1


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """Those of this process."""
    steps = OptimizerSteps()
    hooks.watch_steps(None, steps.add)
    return steps
