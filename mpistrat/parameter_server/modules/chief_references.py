"""Torch modules in the functions that a chief has its workers execute: the chief's side.

A tensor on servers is sent as its place there. Everything else of a module is sent by value with each function, as what
a function captures is: also the numbers of an optimizer's param groups.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mpistrat.context import AnyStrategy
from mpistrat.parameter_server.modules.remote_modules import RemoteModules
from mpistrat.parameter_server.modules.remote_steps import has_remote_parameters
from mpistrat.parameter_server.modules.worker_modules import SCHEDULER, arrive
from mpistrat.pytorch import hooks


class ChiefReferences:
    """How the chief pickles what it has of torch: see `coordinator.pickling.References`.

    What the chief has written in place (`load_state_dict`, not `.data`) is sent to the servers with the next function
    that needs it.
    """

    def __init__(self, strategy: AnyStrategy, modules: RemoteModules) -> None:
        self._strategy, self._modules = strategy, modules

    def reference_of(self, value: Any) -> Any | None:
        """Raises: RuntimeError for a lazy parameter, and for a parameter with hooks."""
        if isinstance(value, LRScheduler):
            return SCHEDULER if has_remote_parameters(value.optimizer) else None
        if not isinstance(value, (torch.nn.Module, torch.Tensor)):
            return None
        if self._modules.recorder.changed:
            self._modules.mirror_new()
        if isinstance(value, torch.nn.Module):
            return None
        key = self._modules.tensors.key_of(value)
        if key is None:
            if is_lazy(value):
                raise RuntimeError(
                    f"parameter {self._name_of(value)} of a lazy module has no shape yet: call its forward once, on "
                    "the chief, before a function that uses it is scheduled"
                )
            return None
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"parameter {self._name_of(value)} has a hook, which does not travel: register it in the scheduled "
                "function, or on its module"
            )
        self._modules.tensors.send_written(self._modules.tensors.held([value]))
        return key

    def resolve(self, key: Any) -> Any:
        return self._modules.tensors.find(key)

    def reduction_of(self, value: Any) -> tuple[Any, ...] | None:
        """Modules and optimizers are copied so that the worker takes note of them."""
        number = None
        if isinstance(value, torch.nn.Module):
            if not self._modules.recorder.knows(value):
                return None
        elif isinstance(value, Optimizer) and has_remote_parameters(value):
            number = self._modules.steps.of(value).number
            value._opt_called = True  # type: ignore[attr-defined]  # else schedulers say that they step too early
        else:
            return None
        with hooks.copied_as_it_is():  # what is on servers is sent as its place there
            reduced = value.__reduce_ex__(4)  # the lowest protocol that keeps the state apart
        if len(reduced) < 3 or any(reduced[3:]):
            return None
        make, args, state = reduced[:3]
        set_state = functools.partial(arrive, self._strategy, number)
        return make, args, state, None, None, set_state

    def _name_of(self, tensor: torch.Tensor) -> str:
        for root in self._modules.recorder.roots():
            for name, parameter in root.named_parameters():
                if parameter is tensor:
                    return f"{type(root).__name__}.{name}"
        return f"of shape {list(tensor.shape)}" if not is_lazy(tensor) else ""
