"""The only file that puts functions of this package in the place of torch's, or has each optimizer call some.

All of it happens once per process, however often it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpistrat.context import get_replica_context

original_backward = torch.autograd.backward


def replace_backward(replacement: Callable[..., None]) -> None:
    """Have programs, and `Tensor.backward`, call `replacement` instead of `torch.autograd.backward`."""
    if torch.autograd.backward is original_backward:
        torch.autograd.backward = replacement


def inside_backward() -> bool:
    """Whether this thread is in a hook or a function that the autograd engine calls."""
    return torch._C._current_graph_task_id() != -1


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step is called with a closure. Args: as a hook of steps gets them: `args` begin with the optimizer."""
    return kwargs.get("closure") is not None or any(callable(argument) for argument in args[1:])


def twin_of(
    optimizer: Optimizer, instead: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> Optimizer:
    """An optimizer that shares all attributes, but has `instead(parameters)` in each of its groups."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [{**g, "params": instead(g["params"])} for g in optimizer.param_groups]
    return twin


@functools.cache
def watch_steps(before: Callable[..., Any], after: Callable[..., Any] | None = None) -> None:
    """Have every optimizer call `before`, and `after`, around each step, as torch's hooks of steps are called."""
    register_optimizer_step_pre_hook(before)
    if after is not None:
        register_optimizer_step_post_hook(after)


@functools.cache
def refuse_steps_of_schedulers() -> None:
    """Make schedulers and gradient scalers refuse to step once for each of several replicas of a rank."""
    schedulers = torch.optim.lr_scheduler
    for cls in vars(schedulers).values():
        if isinstance(cls, type) and issubclass(cls, schedulers.LRScheduler):
            _refuse(cls, "step", "the scheduler's step()")
    for name in ("step", "update", "unscale_"):
        _refuse(torch.amp.GradScaler, name, f"GradScaler.{name}()")


def _refuse(cls: type, name: str, call: str) -> None:
    original = cls.__dict__.get(name)
    if original is None:
        return

    @functools.wraps(original)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = get_replica_context()
        if context is not None and context.strategy.extended.replicas.count > 1:
            raise RuntimeError(
                f"{call} inside run would happen once for each of the "
                f"{context.strategy.extended.num_local_replicas} replicas of this rank; call it after run, "
                "or start one rank per replica"
            )
        return original(self, *args, **kwargs)

    setattr(cls, name, refusing)
