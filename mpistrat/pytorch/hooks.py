"""Replacements of torch's functions, and hooks of all optimizers. Only this file replaces functions of torch itself.

Each function is replaced once per process, however often the replacement is asked for. Copies of a program's modules
and optimizers carry nothing of these hooks. A module that the program copies, saves, exports or scripts becomes a plain
torch module.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
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
original_data_setter: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
original_sync_batch_norm = torch.nn.SyncBatchNorm.forward
original_update_bn: Callable[..., None] = torch.optim.swa_utils.update_bn.__wrapped__  # type: ignore[attr-defined]

_NOTHING = contextlib.nullcontext()
_twins: weakref.WeakKeyDictionary[Optimizer, Optimizer] = weakref.WeakKeyDictionary()
# Weak references to methods, by module or optimizer.
_before_state_dict: WeakIdKeyDictionary = WeakIdKeyDictionary()
_before_copy: WeakIdKeyDictionary = WeakIdKeyDictionary()
_state_of_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def replace_backward(replacement: Callable[..., None]) -> None:
    """Have programs, and `Tensor.backward`, call `replacement` instead of `torch.autograd.backward`, for good.

    A second call does nothing. `replacement` may call `original_backward`.
    """
    if torch.autograd.backward is original_backward:
        torch.autograd.backward = not_compiled(replacement)
        when_dynamo_loads(_keep_backward_out_of_graphs)


def _keep_backward_out_of_graphs() -> None:
    """Have `torch.compile` break its graph at `loss.backward()`, whatever `trace_autograd_ops` says.

    With that option a graph would write gradients itself, and call neither `torch.autograd.backward` nor hooks. With
    `fullgraph=True` a function that calls backward() raises.
    Called by: Dynamo's import.
    """
    from torch._dynamo import config, exc, reset
    from torch._dynamo.variables.tensor import TensorVariable

    if not hasattr(config, "trace_autograd_ops"):  # before torch 2.11 graphs always break there
        return

    call_method = TensorVariable.call_method

    @functools.wraps(call_method)
    def call_all_but_backward(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "backward":
            exc.unimplemented(
                gb_type="backward() that mpistrat reduces",
                context=f"call_method {self} backward",
                explanation="A graph that contains backward() would not reduce its gradients over replicas.",
                hints=["Leave backward() out of what is compiled with fullgraph=True."],
            )
        return call_method(self, tx, name, args, kwargs)

    # Not `method_backward`: torch 2.14 looks it up in a table that was made before.
    TensorVariable.call_method = call_all_but_backward  # type: ignore[method-assign]
    reset()  # graphs from before may contain a backward()


def without_compiled_autograd() -> contextlib.AbstractContextManager[None]:
    """Return a context for a call of `original_backward`: inside, compiled autograd is off.

    So the autograd engine itself runs the backward, and calls a parameter's hooks as soon as its gradient is there. If
    compiled autograd is off already, the context does nothing.
    Called by: `reducing_backward`, around each backward that reduces gradients.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is None or not compiled_autograd.compiled_autograd_enabled:
        return _NOTHING
    return compiled_autograd._disable()


def replace_sync_batch_norm(replacement: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Have all modules of `torch.nn.SyncBatchNorm` call `replacement` as their forward."""
    torch.nn.SyncBatchNorm.forward = replacement  # type: ignore[method-assign, assignment]


def replace_update_bn(replacement: Callable[..., None]) -> None:
    """Have `torch.optim.swa_utils.update_bn` call `replacement`, also where a program has imported the name before.

    So the function stays, and its decorator calls another function.
    """
    decorated: Any = torch.optim.swa_utils.update_bn
    for cell in decorated.__closure__:
        if cell.cell_contents is original_update_bn:
            cell.cell_contents = replacement


def before_data_parallel(see: Callable[[torch.nn.Module, str, Any], None]) -> None:
    """Have the constructor of `DistributedDataParallel` first call `see`. It may raise to refuse the wrapper.

    Torch's constructor runs afterwards, and looks for a process group.
    Args: see: a function of the new wrapper, the name "module", and the module to wrap.
    """
    cls = torch.nn.parallel.DistributedDataParallel
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        see(self, "module", module)
        original(self, module, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign]


def first_when_accumulated(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a post-accumulate-grad hook on `parameter` that runs before all such hooks of the program.

    The parameter may be frozen: `requires_grad` stays as it is.
    Args: hook: a function of the parameter; the engine calls it when it has added to `.grad`.
    """
    required = parameter.requires_grad
    # Torch takes hooks only of parameters that require gradients. A frozen parameter may be unfrozen later.
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(not_compiled(hook))
    parameter.requires_grad_(required)
    others = parameter._post_accumulate_grad_hooks
    # The engine calls hooks in the order of their insertion into the dictionary. `move_to_end` does not change that.
    ordered = {handle.id: others.pop(handle.id)}
    ordered.update(others)
    others.clear()
    others.update(ordered)


@contextlib.contextmanager
def noticing_data() -> Iterator[list[tuple[int, torch.Tensor, int]]]:
    """Record each read of a parameter's `.data`, by any thread, inside the block. Only one block may be open at a time.

    Torch counts a write through `.data` in the version of the `.data` tensor, not in the parameter's version.
    Called by: `Arrivals.watched`, around the autograd engine.
    Returns: a context that yields a list. The list grows by a tuple at each read: (`id` of the parameter, the `.data`
        tensor, its version then).
    """
    taken: list[tuple[int, torch.Tensor, int]] = []
    before: Any = vars(torch.nn.Parameter).get("data")
    getter = original_data if before is None else before.fget

    def data(parameter: torch.nn.Parameter) -> torch.Tensor:
        tensor: torch.Tensor = getter(parameter)
        if not tensor.is_inference():
            taken.append((id(parameter), tensor, tensor._version))
        return tensor

    noticing: Any = property(data, original_data_setter)
    torch.nn.Parameter.data = noticing
    try:
        yield taken
    finally:
        if before is None:
            del torch.nn.Parameter.data
        else:
            torch.nn.Parameter.data = before


def around_calls(
    module: torch.nn.Module,
    around: Callable[[torch.nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> None:
    """Have `module(…)` call `around`. It calls the module's forward, perhaps with other arguments.

    `around` is stored where `Module.compile` stores its compiled function, so a later `Module.compile` removes it. If
    the module is compiled already, or has an `around` already, nothing happens. Copies, saved and scripted modules, and
    modules that `torch.compile` returns, do not call `around`.
    Called by: `placing.compute_there`.
    Args: around: gets the module, the function to call, and the positional and keyword arguments of the call. Its
        result is the result of `module(…)`.
    """
    if module._compiled_call_impl is None:
        reference = weakref.ref(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            called: Any = reference()
            return around(called, called._call_impl, args, kwargs)

        module._compiled_call_impl = call


def before_state_dict(module: torch.nn.Module, call: Callable[[torch.nn.Module], None]) -> None:
    """Have `module.state_dict()` first call the method `call` with the module.

    Inside a replica, and after the method's object is freed, `state_dict()` does not call it. Another
    `before_state_dict` for the same module replaces `call`. Copies of the module do not call it.
    Args: call: a bound method; this keeps a weak reference to its object.
    """
    _replace_state_dict()
    _before_state_dict[module] = weakref.WeakMethod(call)


def before_copy(module: torch.nn.Module, call: Callable[[torch.nn.Module], None]) -> None:
    """Have pickling, saving and copying `module`, and its `state_dict()`, first call the method `call` with it.

    Inside a replica, and inside `copied_as_it_is`, copies do not call it. Called by: modules with parameter servers.
    """
    before_state_dict(module, call)
    _replace_reductions()
    _before_copy[module] = weakref.WeakMethod(call)


def state_of_copies(optimizer: Optimizer, state: Callable[[Optimizer], Any]) -> None:
    """Have pickles, saved files and copies of `optimizer` contain another state than `optimizer.state`.

    The optimizer itself is not changed.
    Args: state: a bound method that gets the optimizer and returns the state for the copy. After its object is freed,
        copies get `optimizer.state`.
    """
    _replace_reductions()
    _state_of_copies[optimizer] = weakref.WeakMethod(state)


@contextlib.contextmanager
def copied_as_it_is() -> Iterator[None]:
    """Inside the block, copies and pickles that this thread makes ignore `before_copy` and `state_of_copies`."""
    before = _copying.as_it_is
    _copying.as_it_is = True
    try:
        yield
    finally:
        _copying.as_it_is = before


class _Copying(threading.local):
    as_it_is = False


_copying = _Copying()


def _call_for(calls: WeakIdKeyDictionary, module: torch.nn.Module) -> None:
    reference = calls.get(module)
    if reference is None:
        return
    call = reference()
    # A replica reads its own buffers.
    if call is not None and not (has_strategy() and get_replica_context() is not None):
        call(module)


@functools.cache
def _replace_state_dict() -> None:
    _replace_method(
        torch.nn.Module, "state_dict", lambda module: _call_for(_before_state_dict, module)
    )


@functools.cache
def _replace_reductions() -> None:
    original = torch.nn.Module.__reduce_ex__
    original_state = Optimizer.__getstate__

    @functools.wraps(original)
    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        if not _copying.as_it_is:
            _call_for(_before_copy, self)
        return original(self, protocol)

    @functools.wraps(original_state)
    def state_of(self: Optimizer) -> dict[str, Any]:
        kept = original_state(self)
        reference = _state_of_copies.get(self)
        if reference is None or _copying.as_it_is:
            return kept
        state = reference()
        if state is None:
            return kept
        return {**kept, "state": state(self)}

    torch.nn.Module.__reduce_ex__ = reduce  # type: ignore[method-assign, assignment]
    Optimizer.__getstate__ = state_of  # type: ignore[method-assign]


@functools.cache
def before_export(check: Callable[[torch.nn.Module], None]) -> None:
    """Have `torch.export.export` first call `check` with its module, and `torch.jit.script` with each embedding in it.

    Args: check: a function of a module. It raises to refuse the export.
    """
    original = torch.export.export

    @functools.wraps(original)
    def export(mod: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        check(mod)
        return original(mod, *args, **kwargs)

    def prepare(self: torch.nn.Module) -> torch.nn.Module:
        check(self)
        return self

    torch.export.export = export
    embeddings: list[Any] = [torch.nn.Embedding, torch.nn.EmbeddingBag]
    for cls in embeddings:
        cls.__prepare_scriptable__ = prepare


# Returns the number of the backward() that runs on this thread, inside a hook or a function; -1 outside.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of `optimizer`, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether an optimizer's `step` was called with a closure.

    Args: args, kwargs: the arguments of torch's step hook; `args[0]` is the optimizer.
    """
    has_keyword = kwargs.get("closure") is not None
    return has_keyword or any(callable(argument) for argument in args[1:])


def with_closure(args: Any, kwargs: Any, call: Callable[..., Any]) -> tuple[Any, Any]:
    """Return a step's arguments with another closure: the step calls `call(closure)` where it called `closure()`.

    Args:
        args, kwargs: the arguments of torch's step hook; `args[0]` is the optimizer. They are not changed.
        call: a function that gets the closure, and returns the loss.
    Returns: the new positional and keyword arguments of the step.
    """
    optimizer, *others = args
    others = [functools.partial(call, a) if callable(a) else a for a in others]
    if kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": functools.partial(call, kwargs["closure"])}
    return (optimizer, *others), kwargs


def twin_of(
    optimizer: Optimizer, instead: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> Optimizer:
    """Return a second optimizer, the twin, that steps other tensors with the options of `optimizer`.

    The twin has the same class and attributes, and its own groups. Each step of `optimizer` gets the same twin object,
    because compiled steps need that. Call `dismiss_twin` after the step.
    Args: instead: gets the parameters of a group, and returns the tensors for the twin's group.
    """
    twin = _twins.get(optimizer)
    if twin is None:
        twin = _twins[optimizer] = object.__new__(type(optimizer))
    twin.__dict__ = dict(optimizer.__dict__)
    twin.param_groups = [{**g, "params": instead(g["params"])} for g in optimizer.param_groups]
    return twin


def is_twin(optimizer: Optimizer) -> bool:
    """Whether `optimizer` was made by `twin_of`."""
    return optimizer in _twins.values()


def dismiss_twin(optimizer: Optimizer, stepped: Optimizer) -> None:
    """Empty a twin after its step, because its attributes may refer to the optimizer and keep it alive.

    Args: stepped: the optimizer that took the step. If it is `optimizer` itself, nothing happens.
    """
    if stepped is not optimizer:
        stepped.__dict__.clear()


@functools.cache
def watch_steps(before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Register torch's global step hooks: every optimizer calls `before` and `after` around each step.

    A second call with the same functions does nothing.
    Args:
        before: gets (optimizer, args, kwargs), and may return new args and kwargs.
        after: gets (optimizer, args, kwargs).
    """
    register_optimizer_step_pre_hook(not_compiled(before))
    register_optimizer_step_post_hook(not_compiled(after))


class OptimizerSteps:
    """The counter that `optimizer_steps` returns.

    Attributes: count: number of steps of all optimizers in this process since `optimizer_steps` was first called.
    """

    count = 0


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """Return the counter of all optimizer steps of this process. It starts at 0 in the first call.

    Each call returns the same object. Steps outside any strategy count, too.
    Called by: `PreemptionCheckpointHandler`.
    """
    steps = OptimizerSteps()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps.count += 1

    register_optimizer_step_post_hook(not_compiled(after))
    return steps


@functools.cache
def watch_other_steps(before: Callable[[Any], None]) -> None:
    """Have every learning rate scheduler and gradient scaler call `before` with itself before each `step`."""
    for cls in (*_scheduler_classes(), torch.amp.GradScaler):
        _replace_method(cls, "step", not_compiled(before))


@functools.cache
def refuse_steps_of_schedulers() -> None:
    """Have schedulers, gradient scalers and averaged models raise RuntimeError inside `run`, with several replicas.

    They would step once for each replica of the rank. A disabled scaler does not raise, because it only calls the
    optimizer's step.
    """
    for cls in _scheduler_classes():
        _refuse(cls, "step", "the scheduler's step()")
    for name in ("step", "update", "unscale_"):
        _refuse(torch.amp.GradScaler, name, f"GradScaler.{name}()")
    averaged = torch.optim.swa_utils.AveragedModel
    _refuse(averaged, "update_parameters", "AveragedModel.update_parameters()")


def _scheduler_classes() -> list[type]:
    scheduler = torch.optim.lr_scheduler.LRScheduler
    found = vars(torch.optim.lr_scheduler).values()
    return [cls for cls in found if isinstance(cls, type) and issubclass(cls, scheduler)]


def _refuse(cls: type, name: str, call: str) -> None:
    """Have the method `cls.name` raise RuntimeError inside `run` if the rank has several replicas."""

    def check(self: Any) -> None:
        context = get_replica_context()
        disabled = isinstance(self, torch.amp.GradScaler) and not self.is_enabled()
        if context is None or disabled:
            return
        count = context.replicas.count
        if count > 1:
            raise RuntimeError(
                f"{call} inside run would happen once for each of the {count} replicas of this rank; call it after "
                "run, or start one rank per replica"
            )

    _replace_method(cls, name, check)


def _replace_method(cls: type, name: str, before: Callable[[Any], None]) -> None:
    """Have the method `cls.name` first call `before` with its object. If `cls` only inherits it, nothing happens."""
    original = cls.__dict__.get(name)
    if original is None:
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        return original(self, *args, **kwargs)

    setattr(cls, name, method)
