"""Optimizer steps inside `run`: only of mirrored parameters, and once per rank.

Torch calls global hooks before and after each `optimizer.step()`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpistrat.context import get_replica_context
from mpistrat.pytorch.backward import reducer_here
from mpistrat.pytorch.gradients import GradientReducer

_installed = False
# Optimizers whose parameters were all found to be mirrored, with how many there were.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = (
    weakref.WeakKeyDictionary()
)
_hidden: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}


def install() -> None:
    """Register the hooks, once per process."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    reducer = reducer_here()
    if reducer is None:
        return
    _check_mirrored(optimizer, reducer)
    context = get_replica_context()
    assert context is not None
    extended = context.strategy.extended
    if extended.num_local_replicas > 1:
        # The parameters are one storage: all replicas arrive, the first steps, the others find no
        # gradients.
        extended.replicas.meet(context.local_index, lambda everyone: None, ())
        if context.local_index > 0:
            hidden = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            for parameter, _ in hidden:
                parameter.grad = None
            _hidden[id(optimizer)] = hidden


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    reducer = reducer_here()
    if reducer is None:
        return
    context = get_replica_context()
    assert context is not None
    if context.local_index == 0:
        reducer.steps += 1
    for parameter, gradient in _hidden.pop(id(optimizer), ()):
        parameter.grad = gradient


def _check_mirrored(optimizer: torch.optim.Optimizer, reducer: GradientReducer) -> None:
    """RuntimeError if the step would change a parameter that is not mirrored."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == (id(reducer), count):
        return
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter not in reducer.registry:
                raise RuntimeError(
                    f"optimizer.step() inside run: parameter {i} of group {g}, of shape "
                    f"{list(parameter.shape)}, was never mirrored, so its replicas would drift apart. "
                    "Build the module inside strategy.scope(), or call strategy.mirror(module) after "
                    "building, copying or unpickling it; a lazy module needs one forward in scope()"
                )
    _checked[optimizer] = (id(reducer), count)
