"""Checks of optimizer steps inside `run`: they step only mirrored parameters, once per rank, alike on all ranks.

Torch calls the hooks of this file before and after each `optimizer.step()`. They also warn if each rank trains a model
of its own, without `run`.
"""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpistrat import arrays
from mpistrat.context import AnyReplicaContext, current_mode
from mpistrat.errors import CollectiveMismatchError
from mpistrat.machine.notices import warn_on_first_rank
from mpistrat.pytorch import hooks, virtual_replicas
from mpistrat.pytorch.gradients.reducer import GradientReducer, replica_here
from mpistrat.pytorch.modules.preparing import check_alike
from mpistrat.pytorch.modules.strategy_modules import all_modules, strategy_of
from mpistrat.torch_distributed.next_group import has_default_group
from mpistrat.values import by_owner

# For each optimizer, as of its last check: id of the reducer, whether it had reduced gradients, `requires_grad` of
# each parameter, and the parameters' `id`s.
_checked: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
_has_warned = False
# Parameters with the gradients that are hidden from their optimizer's step, by the optimizer's `id`.
_hidden: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}


def install() -> None:
    """Check the steps of all optimizers, schedulers and gradient scalers from now on."""
    hooks.watch_steps(_before_step, _after_step)
    hooks.watch_other_steps(_before_other_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Check a step inside `run`. Outside, warn once if each rank seems to train a model of its own.

    Called by: torch, before each `optimizer.step()` of the process.
    Returns: None if `step` keeps its arguments. Else other (args, kwargs): with a closure that returns the loss of all
        ranks for LBFGS, or with the optimizer that steps slices of parameters that a node's ranks share.
    Raises: RuntimeError inside a hook of backward(), for a parameter that is not mirrored, or for a closure if this
        rank has several replicas; ValueError if the ranks' optimizers differ.
    """
    here = replica_here()
    if here is None:
        _warn_of_lone_ranks(optimizer)
        return None
    context, reducer = here
    if hooks.graph_task() >= 0:
        raise RuntimeError(
            "optimizer.step() was called by a hook inside backward(), before gradients are reduced over "
            "replicas; call it after backward()"
        )
    _check_parameters(optimizer, context, reducer)
    if reducer.parts.replicas.count > 1:
        _let_first_step(optimizer, context, reducer, hooks.has_closure(args, kwargs))
    watch = reducer.parts.watch
    if watch is not None and context.local_index == 0:
        watch.before_step(optimizer)
    instead = None
    if isinstance(optimizer, torch.optim.LBFGS):  # LBFGS decides by the loss of its closure
        loss_of_all = functools.partial(_loss_of_all, reducer)
        instead = args, kwargs = hooks.with_closure(args, kwargs, loss_of_all)
    if reducer.slice_steps is not None:
        return reducer.slice_steps.before(optimizer, args, kwargs) or instead
    return instead


def _let_first_step(
    optimizer: Optimizer, context: AnyReplicaContext, reducer: GradientReducer, has_closure: bool
) -> None:
    """Let only the first replica of this rank step, because the rank's replicas share one copy of the parameters.

    Each replica waits until all have come here. Then the gradients of the other replicas are set to None, so that their
    steps change nothing. `_after_step` puts their gradients back.
    Raises: RuntimeError if `has_closure`.
    """
    if has_closure:
        raise RuntimeError(
            "optimizer.step(closure) inside run would step once for each replica of this rank, and these "
            "share their parameters; call backward() and then step(), or start one rank per replica"
        )
    reducer.parts.replicas.meet(context.local_index, _nothing, ())
    if context.local_index > 0:
        hidden = [(p, p.grad) for p in hooks.parameters_of(optimizer)]
        _hidden[id(optimizer)] = hidden
        for parameter, _ in hidden:
            parameter.grad = None


def _nothing(replicas: Any) -> None:
    """Do nothing. `meet` needs a function, though here the replicas only wait for each other."""


def _loss_of_all(reducer: GradientReducer, closure: Callable[[], Any]) -> Any:
    """Call `closure`, and return the weighted sum of all ranks' losses, equal on all ranks. Collective.

    A rank's weight is its `GradientReducer.share` of the last backward; a rank with weight 0 does not count. If all
    losses are equal already, the closure's own result is returned: the program has combined the losses itself.
    Called by: LBFGS, instead of the program's closure.
    Returns: a tensor like the loss, without a graph; a float if the loss is a number.
    Raises: CollectiveMismatchError if the losses differ in type or shape, are not single real numbers, or a rank has
        made no backward yet.
    """
    communicator = reducer.parts.group.communicator
    loss = closure()
    of_rank = (*_kind_and_value(loss), reducer.share)
    kinds, values, shares = zip(*communicator.all_gather_object(of_rank), strict=True)
    is_one_kind = len(set(kinds)) == 1
    texts = {repr(value) for value in values}  # NaN does not equal NaN
    if is_one_kind and len(texts) == 1:
        return loss
    if not is_one_kind or None in (*values, *shares):
        returned = by_owner(kinds, str, "rank")
        raise CollectiveMismatchError(
            f"optimizer.step(closure) on rank {communicator.rank}: LBFGS needs one loss for all ranks, and "
            f"the losses of the ranks cannot be combined ({returned}). Have the closure call backward() on the loss of "
            "this rank's part and return it as a tensor of one number, or return the same on all ranks"
        )
    # A rank without examples has the weight 0 and a loss of NaN, so it is left out.
    weighted = []
    for share, value in zip(shares, values, strict=True):
        if share:
            weighted.append(share * value)
    total = sum(weighted)
    if arrays.is_torch(loss):
        return torch.full_like(loss.detach(), total)
    return total


def _kind_and_value(loss: Any) -> tuple[str, float | None]:
    """Return words for the type and shape of `loss`, and its value as a float; None if it is not one real number."""
    if isinstance(loss, numbers.Real):
        return "a number", float(loss)
    if not arrays.is_torch(loss):
        return repr(loss)[:60], None
    value = None
    if loss.numel() == 1 and not loss.is_complex():
        value = float(loss.item())
    return f"a tensor of shape {list(loss.shape)}", value


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    here = replica_here()
    if here is None:
        return
    context, reducer = here
    if context.local_index == 0:
        reducer.steps += 1
        virtual_replicas.stepped(reducer.parts.replicas)
    if reducer.slice_steps is not None:
        reducer.slice_steps.after(optimizer, args[0])
    watch = reducer.parts.watch
    if watch is not None and context.local_index == 0:
        watch.after_step(optimizer)
    for parameter, gradient in _hidden.pop(id(optimizer), ()):
        parameter.grad = gradient


def _before_other_step(value: torch.amp.GradScaler | LRScheduler) -> None:
    here = replica_here()
    # A scheduler may belong to one rank alone: it prints rates, or it decides by a metric and broadcasts the rate.
    is_shared = not isinstance(value, LRScheduler) or value.optimizer in _checked
    # A plateau's metric may be each rank's own; ranks may then broadcast the rate.
    if here is not None and is_shared and not isinstance(value, ReduceLROnPlateau):
        _compare(value, *here)


def _compare(value: Any, context: AnyReplicaContext, reducer: GradientReducer) -> None:
    """Compare `value`, an optimizer, scheduler or scaler, over the ranks. Collective in its first step; else nothing.

    Before the first reduction of gradients nothing is compared, because the reduction has a better message for ranks in
    different steps. Optimizers that step slices of shared parameters (`hooks.twin_of`) differ, so they are left out.
    Raises: ValueError on all ranks if `value` differs.
    """
    extended = context.strategy.extended
    is_known = value in extended.modules.made.compared
    if reducer.has_reduced and not is_known and not hooks.is_twin(value):
        check_alike(extended, {"in a step": value})


def _warn_of_lone_ranks(optimizer: Optimizer) -> None:
    """Warn once, on rank 0, if a program seems to have forgotten `scope()` and `run`, so that each rank trains alone.

    There is no warning if torch has a default process group, a strategy mirrors a parameter of `optimizer`, or any
    optimizer has stepped inside `run`.
    Called by: `_before_step`, unless the step is inside `run` or `replica()` of a strategy with several replicas.
    """
    global _has_warned
    if _has_warned or has_default_group():
        return  # DistributedDataParallel may keep the parameters equal
    mode = current_mode()
    inside_run = mode.replica_context is not None and not mode.strategy.is_default
    together = [m for m in all_modules if m.parts.group.communicator.size > 1]
    if inside_run or not together or any(m.reducer.steps for m in together):
        return
    if strategy_of(optimizer) is None:
        _has_warned = True
        communicator = together[0].parts.group.communicator
        warn_on_first_rank(
            communicator.rank,
            f"optimizer.step() outside run, of parameters that no strategy mirrors: each of the "
            f"{communicator.size} ranks of {together[0].parts.strategy} trains a model of its own. If this is not "
            "intended, build the model in strategy.scope(), and have strategy.run call the function that makes a step",
            stacklevel=4,
        )


def _check_parameters(
    optimizer: Optimizer, context: AnyReplicaContext, reducer: GradientReducer
) -> None:
    """Check an optimizer's parameters before its step, unless they are the same as at the last check.

    The optimizer then gets its number in `reducer.optimizers`. Collective in the first step of these parameters.
    Raises:
        RuntimeError: a trainable parameter is neither mirrored nor a DTensor.
        ValueError: on all ranks, if their optimizers differ when they first step these parameters.
    """
    parameters = hooks.parameters_of(optimizer)
    ids = [id(parameter) for parameter in parameters]
    trainable = [parameter.requires_grad for parameter in parameters]
    found = id(reducer), reducer.has_reduced, trainable, ids
    before = _checked.get(optimizer)
    if before == found:
        return
    _check_mirrored(optimizer, reducer)
    if before is not None and before[-1] != ids:
        context.replicas.modules.made.compared.pop(optimizer, None)
    # The rank's other replicas do not get here, because they find the entry in `_checked`.
    _compare(optimizer, context, reducer)
    if optimizer not in reducer.optimizers.values():
        reducer.optimizers[next(reducer.numbers)] = optimizer
        watch = reducer.parts.watch
        if watch is not None:
            watch.add(optimizer)
    _checked[optimizer] = found


def _check_mirrored(optimizer: Optimizer, reducer: GradientReducer) -> None:
    for g, group in enumerate(optimizer.param_groups):
        of_group = group["params"]
        names = group.get("param_names") or [f"{i} of group {g}" for i in range(len(of_group))]
        for name, parameter in zip(names, of_group, strict=True):
            if arrays.is_sharded(parameter):
                reducer.check_may_be_sharded(name)
            elif parameter.requires_grad and parameter not in reducer.registry:
                raise RuntimeError(
                    f"optimizer.step() inside run: parameter {name}, of shape {list(parameter.shape)}, "
                    "was never mirrored, so its replicas would drift apart. Import torch, and then build the module "
                    "inside strategy.scope(), or call strategy.mirror(module) after building, copying or "
                    "unpickling it; and give the optimizer its parameters (of a lazy module: after a forward)"
                )
