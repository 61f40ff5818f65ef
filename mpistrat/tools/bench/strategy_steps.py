"""The training step with mpistrat."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from mpistrat.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpistrat.strategy import Strategy
from mpistrat.tools.bench.work import Step, Work, step_of

# In this many first steps a strategy tries how gradients travel fastest (`CommunicationOptions.overlap`).
STEPS_OF_TRIALS = 20


def with_strategy(work: Work, strategy: Strategy) -> tuple[Step, torch.nn.Module]:
    with strategy.scope():
        module, optimizer = work.build()
    step = step_of(work, module, optimizer)
    return functools.partial(strategy.run, step), module


def with_mpistrat(work: Work, options: Any = None, **more: Any) -> Step:
    """Return a training step under a new `MultiWorkerMirroredStrategy`, as `past_trials` does.

    Called by: every rank.
    Args:
        options: communication options; None: the defaults.
        more: further arguments of the strategy.
    """
    return past_trials(
        work,
        MultiWorkerMirroredStrategy(None, options, devices=[work.device], gradients="mean", **more),
    )


def past_trials(work: Work, strategy: Strategy) -> Step:
    """Run 20 steps: in these, `strategy` tries how gradients travel fastest. Then restore the module's first weights.

    Called by: every rank.   Returns: the training step.
    """
    step, module = with_strategy(work, strategy)
    first = copy.deepcopy(module.state_dict())
    for _ in range(STEPS_OF_TRIALS):
        step()
    module.load_state_dict(first)
    return step
