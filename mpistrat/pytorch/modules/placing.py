"""Moves modules to the device of their strategy. Parameters stay the same objects, so optimizers keep them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from mpistrat import arrays
from mpistrat.pytorch import hooks


def place(module: torch.nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Move the parameters of `module`, with their gradients, and its buffers to `device`.

    Parameters stay the same objects. A buffer that two modules share stays shared. Lazy tensors will be made on
    `device`. Tensors on "meta" and DTensors are not moved.
    Returns: the parameters that were moved; empty if all were there.
    Raises: RuntimeError if torch cannot move a parameter, because something has a weak reference to it.
    """
    parameters: list[torch.Tensor] = []
    buffers: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for name, child in module.named_modules():
            if isinstance(child, torch.nn.RNNBase):
                child._flat_weight_refs = []  # torch does not swap tensors with weak references
            for key, parameter in child._parameters.items():
                if _is_elsewhere(parameter, device):
                    path = f"{name}.{key}".lstrip(".")
                    _move(parameter, device, f"{path} of {type(module).__name__}")
                    parameters.append(parameter)
            if isinstance(child, torch.nn.RNNBase):
                child._init_flat_weights()
            for key, buffer in child._buffers.items():
                if _is_elsewhere(buffer, device):
                    if id(buffer) not in buffers:
                        lazy = is_lazy(buffer)
                        buffers[id(buffer)] = (
                            type(buffer)(False, device, buffer.dtype) if lazy else buffer.to(device)
                        )
                    child._buffers[key] = buffers[id(buffer)]
    return parameters


def _is_elsewhere(tensor: torch.Tensor | None, device: torch.device) -> TypeGuard[torch.Tensor]:
    if tensor is None or tensor.is_meta or arrays.is_sharded(tensor):
        return False
    return tensor.device != device


def place_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Move parameters that are in no module, with their gradients, to `device`. They stay the same objects.

    Returns: the parameters that were moved. Tensors on "meta" and DTensors are not moved.
    Raises: RuntimeError if torch cannot move a parameter and keep its object, because something has a weak reference to
        it.
    """
    elsewhere = [tensor for tensor in tensors if _is_elsewhere(tensor, device)]
    with torch.no_grad():
        for tensor in elsewhere:
            _move(tensor, device, f"of shape {list(tensor.shape)}")
    return elsewhere


def _move(parameter: torch.Tensor, device: torch.device, name: str) -> None:
    """Move `parameter` and its gradient to `device`. The parameter stays the same object.

    A lazy parameter gets no memory, but will be made on `device`.
    Args: name: the parameter's name, for the message.
    Raises: RuntimeError if torch has to swap two tensors, and something has a weak reference to `parameter`.
    """
    kind: Any = type(parameter)
    if is_lazy(parameter):
        there = kind(parameter.requires_grad, device, parameter.dtype)
    else:
        there = parameter.to(device)
        gradient = parameter.grad
        if torch._has_compatible_shallow_copy_type(parameter, there):
            parameter.data = there
            if gradient is not None:
                gradient.data = gradient.to(device)
            return
        if isinstance(parameter, torch.nn.Parameter):
            there = torch.nn.Parameter(there)
        there.requires_grad_(parameter.requires_grad)
        if gradient is not None:
            there.grad = gradient.to(device)
    # Tensors of XLA and some other devices have another C++ type than host tensors, so torch refuses to set .data.
    try:
        torch.utils.swap_tensors(parameter, there)
    except RuntimeError as error:
        raise RuntimeError(
            f"parameter {name} cannot be brought to {device} at the scope's end ({error}). Move the module before "
            f"anything refers to the parameter: call .to({str(device)!r}) in the scope"
        ) from error


def bring_states(parameters: Collection[torch.Tensor]) -> None:
    """Move the state of `parameters` in all optimizers of this process to the devices of `parameters`.

    Step counts stay on the host, as after `load_state_dict`, unless the optimizer is capturable or fused.
    Args: parameters: the parameters that were moved.
    """
    moved = set(parameters)
    if not moved:
        return
    # Only the garbage collector knows all optimizers: a program may make one outside the scope, and restore it inside.
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts_on_host = not (group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                if parameter not in moved:
                    continue
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if not (key == "step" and counts_on_host):
                        state[key] = _on(parameter.device, value)


def compute_there(module: torch.nn.Module, device: torch.device) -> None:
    """Let `module(…)` take tensors on other devices, as long as its first parameter is on `device`.

    A call moves the tensors in its arguments to `device`, and the results to the device that the first argument tensor
    was on. A program can then evaluate outside `run` without moving batches to devices itself. A call with any tensor
    on `device`, as inside `run`, moves nothing.
    """

    def around(
        module: torch.nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        first = next(iter(args), None)
        if isinstance(first, torch.Tensor) and first.device == device:
            return call(*args, **kwargs)
        devices = []
        for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_packed):
            tensor = leaf.data if _is_packed(leaf) else leaf
            if isinstance(tensor, torch.Tensor):
                devices.append(tensor.device)
        parameter = next(module.parameters(), None)
        is_there = parameter is not None and parameter.device == device
        if not devices or device in devices or not is_there:
            return call(*args, **kwargs)
        args, kwargs = _on(device, (args, kwargs))
        return _on(devices[0], call(*args, **kwargs))

    hooks.around_calls(module, around)


def _on(device: torch.device, values: Any) -> Any:
    """Return `values`, a structure, with its tensors on `device`."""

    def moved(value: Any) -> Any:
        return value.to(device) if _can_move(value) else value

    return pytree.tree_map(moved, values, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    """Whether `value` is a `PackedSequence`, a tuple with one tensor that must stay on the host."""
    return isinstance(value, PackedSequence)


def _can_move(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, PackedSequence))
