"""How many steps the optimizers of this process have made, of one rank's strategies, too."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer

from mpistrat.pytorch import hooks


class OptimizerSteps:
    """Attributes: count: of all optimizers, since this was asked for first."""

    count = 0


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """Those of this process."""
    steps = OptimizerSteps()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps.count += 1

    hooks.watch_steps(None, after)
    return steps
