"""The only file that puts functions of this package in the place of torch's, or has each optimizer call some.

All of it happens once per process, however often it is asked for. Nothing is put into a program's own modules and
optimizers: what it copies, saves, exports or scripts is torch's alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.context import get_replica_context, has_strategy
from mpistrat.pytorch.compilation import not_compiled, when_dynamo_loads

original_backward = torch.autograd.backward
original_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
original_sync_batch_norm = torch.nn.SyncBatchNorm.forward

_NOTHING = contextlib.nullcontext()
_before_state_dict: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by module: a weak reference
_twins: weakref.WeakKeyDictionary[Optimizer, Optimizer] = weakref.WeakKeyDictionary()


def replace_backward(replacement: Callable[..., None]) -> None:
    """Have programs, and `Tensor.backward`, call `replacement` instead of `torch.autograd.backward`."""
    if torch.autograd.backward is original_backward:
        torch.autograd.backward = not_compiled(replacement)
        when_dynamo_loads(_keep_backward_out_of_graphs)


def _keep_backward_out_of_graphs() -> None:
    """Have `torch.compile` break its graph at `loss.backward()` whatever `trace_autograd_ops` says.

    With that option a graph writes gradients itself, and calls neither `torch.autograd.backward` nor any hook.
    """
    from torch._dynamo import config, exc
    from torch._dynamo.variables.tensor import TensorVariable

    if not hasattr(config, "trace_autograd_ops"):  # before torch 2.11 it always does
        return

    def method_backward(self: Any, *_: Any, **__: Any) -> Any:
        exc.unimplemented(
            gb_type="backward() that mpistrat reduces",
            context=f"call_method {self} backward",
            explanation="A graph that contains backward() would not reduce its gradients over replicas.",
            hints=["Leave backward() out of what is compiled with fullgraph=True."],
        )

    TensorVariable.method_backward = method_backward  # type: ignore[method-assign]


def without_compiled_autograd() -> contextlib.AbstractContextManager[None]:
    """Have the autograd engine itself do the backwards inside: it calls hooks when gradients are there."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is None or not compiled_autograd.compiled_autograd_enabled:
        return _NOTHING
    disabled: contextlib.AbstractContextManager[None] = compiled_autograd._disable()
    return disabled


def replace_sync_batch_norm(replacement: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Have modules of `torch.nn.SyncBatchNorm` call `replacement` as their forward."""
    torch.nn.SyncBatchNorm.forward = replacement  # type: ignore[method-assign, assignment]


def replace_data(getter: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
    """Have `.data` of parameters be what `getter` returns; what is assigned to it goes to torch."""
    torch.nn.Parameter.data = property(getter, torch.Tensor.data.__set__)  # type: ignore


def before_state_dict(module: torch.nn.Module, call: Callable[[torch.nn.Module], None]) -> None:
    """Have `module.state_dict()` call `call`, a method, with it first: not inside run, nor when its object is freed.

    The last call for a module counts. Its copies do not call anything.
    """
    _replace_state_dict()
    _before_state_dict[module] = weakref.WeakMethod(call)


@functools.cache
def _replace_state_dict() -> None:
    original = torch.nn.Module.state_dict

    @functools.wraps(original)
    def state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        reference = _before_state_dict.get(self)
        call = None if reference is None else reference()
        # Inside run a replica reads its own.
        if call is not None and not (has_strategy() and get_replica_context() is not None):
            call(self)
        return original(self, *args, **kwargs)

    torch.nn.Module.state_dict = state_dict  # type: ignore[method-assign]


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
    """An optimizer that shares all attributes, but has `instead(parameters)` in each of its groups.

    It is the same object at each step, as compiled steps want; `dismiss_twin` after the step.
    """
    twin = _twins.get(optimizer)
    if twin is None:
        twin = _twins[optimizer] = object.__new__(type(optimizer))
    twin.__dict__ = dict(optimizer.__dict__)
    twin.param_groups = [{**g, "params": instead(g["params"])} for g in optimizer.param_groups]
    return twin


def dismiss_twin(optimizer: Optimizer, stepped: Optimizer) -> None:
    """Drop what `stepped` shares if it is the optimizer's twin, for that may refer to the optimizer."""
    if stepped is not optimizer:
        stepped.__dict__.clear()


@functools.cache
def watch_steps(before: Callable[..., Any], after: Callable[..., Any] | None = None) -> None:
    """Have every optimizer call `before`, and `after`, around each step, as torch's hooks of steps are called."""
    register_optimizer_step_pre_hook(not_compiled(before))
    if after is not None:
        register_optimizer_step_post_hook(not_compiled(after))


@functools.cache
def refuse_steps_of_schedulers() -> None:
    """Make schedulers, gradient scalers and averaged models refuse to step once for each of several replicas of a rank.

    A scaler that is disabled does nothing but call the optimizer's step.
    """
    schedulers = torch.optim.lr_scheduler
    for cls in vars(schedulers).values():
        if isinstance(cls, type) and issubclass(cls, schedulers.LRScheduler):
            _refuse(cls, "step", "the scheduler's step()")
    for name in ("step", "update", "unscale_"):
        _refuse(torch.amp.GradScaler, name, f"GradScaler.{name}()")
    averaged = torch.optim.swa_utils.AveragedModel
    _refuse(averaged, "update_parameters", "AveragedModel.update_parameters()")


def _refuse(cls: type, name: str, call: str) -> None:
    original = cls.__dict__.get(name)
    if original is None:
        return

    @functools.wraps(original)
    def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = get_replica_context()
        disabled = isinstance(self, torch.amp.GradScaler) and not self.is_enabled()
        if context is not None and context.strategy.extended.replicas.count > 1 and not disabled:
            raise RuntimeError(
                f"{call} inside run would happen once for each of the "
                f"{context.strategy.extended.num_local_replicas} replicas of this rank; call it after run, "
                "or start one rank per replica"
            )
        return original(self, *args, **kwargs)

    setattr(cls, name, refusing)
