"""The classes of optimizers and schedulers, and whether one of them can go on from the state of another."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mpistrat import nest
from mpistrat.pytorch import hooks


def classes_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the classes of optimizers, schedulers and gradient scalers, by object name.

    A scheduler that consists of others has a name such as "SequentialLR/LinearLR/StepLR".
    """
    classes = {}
    for name, value in objects.items():
        has_step = callable(getattr(value, "step", None))
        if has_step and not isinstance(value, torch.nn.Module):
            parts = getattr(value, "_schedulers", None) or ()
            names = [type(part).__name__ for part in (value, *parts)]
            classes[name] = "/".join(names)
    return classes


def fits(value: Any, saved_class: str, state: Any) -> bool:
    """Whether `value` can go on from `state`. True for an object that is no optimizer or scheduler of torch.

    A scheduler can if its class is derived from the saved class, or if `state` has all entries of its own state. An
    optimizer can if a step after `load_state_dict(state)` finds all that it looks up. A twin of it tries that, with one
    element in place of each tensor. Other errors of the trial do not count. There is no trial for an optimizer that
    contains another one, because the trial would change that one.

    Args:
        saved_class: name of the class that has saved `state`.
        state: a result of `state_dict`. It is not changed.
    """
    if isinstance(value, LRScheduler):
        bases = [base.__name__ for base in type(value).__mro__]
        return saved_class in bases or value.state_dict().keys() <= state.keys()
    contains = any(isinstance(part, Optimizer) for part in vars(value).values())
    if contains or not isinstance(value, Optimizer):
        return True
    small = torch.zeros(1, device="cpu")
    small.grad = torch.zeros(1, device="cpu")
    small_state = nest.map_structure(lambda leaf: small if torch.is_tensor(leaf) else leaf, state)
    twin = hooks.twin_of(value, lambda parameters: [small] * len(parameters))
    step = inspect.unwrap(type(value).step)  # torch's wrapper would call the hooks of steps
    try:
        twin.load_state_dict(small_state)
        step(twin, lambda: small)
    except Exception as error:  # any error of the program's class
        return not isinstance(error, KeyError)
    finally:
        hooks.dismiss_twin(value, twin)
    return True
