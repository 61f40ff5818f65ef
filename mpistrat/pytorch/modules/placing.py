"""Modules on the device of their strategy: the same parameters, so that optimizers that have them go on."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mpistrat import arrays


def place(module: torch.nn.Module, device: torch.device) -> None:
    """Move what `module` has to `device`: parameters with their gradients, and buffers. Shared ones stay shared.

    Those whose shape comes later will be made there; those whose values come later are left for later. DTensors stay
    where their mesh is.
    Raises: RuntimeError: something keeps a weak reference to a parameter, which would lead to what is no longer one.
    """
    moved: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for name, child in module.named_modules():
            if isinstance(child, torch.nn.RNNBase):
                child._flat_weight_refs = []  # weak ones; what they lead to is to be another
            for key, parameter in child._parameters.items():
                if parameter is not None and _is_elsewhere(parameter, device):
                    kind: Any = type(parameter)
                    there: torch.Tensor = (
                        kind(parameter.requires_grad, device)
                        if is_lazy(parameter)
                        else torch.nn.Parameter(parameter.to(device), parameter.requires_grad)
                    )
                    if parameter.grad is not None:
                        there.grad = parameter.grad.to(device)
                    # XLA's tensors are of another kind than the host's, so setting .data is refused.
                    try:
                        torch.utils.swap_tensors(parameter, there)
                    except RuntimeError as error:
                        raise RuntimeError(
                            f"parameter {f'{name}.{key}'.lstrip('.')} of {type(module).__name__} cannot be brought to "
                            f"{device} at the scope's end ({error}): have the module there before anything refers to "
                            f"it, {type(module).__name__}(…).to({str(device)!r}) in the scope"
                        ) from error
            if isinstance(child, torch.nn.RNNBase):
                child._init_flat_weights()
            for key, buffer in child._buffers.items():
                if buffer is not None and _is_elsewhere(buffer, device):
                    if id(buffer) not in moved:
                        lazy = is_lazy(buffer)
                        moved[id(buffer)] = (
                            type(buffer)(False, device) if lazy else buffer.to(device)
                        )
                    child._buffers[key] = moved[id(buffer)]


def _is_elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device != device and not tensor.is_meta and not arrays.is_sharded(tensor)
