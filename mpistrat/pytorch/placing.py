"""Modules on the device of their strategy: the same parameters, so that optimizers that have them go on."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy


def place(module: torch.nn.Module, device: torch.device) -> None:
    """Move what `module` has to `device`: parameters with their gradients, and buffers. Shared ones stay shared.

    Those whose shape comes later will be made there; those whose values come later are left for later.
    """
    moved: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for child in module.modules():
            for parameter in child._parameters.values():
                if parameter is not None and _is_elsewhere(parameter, device):
                    if is_lazy(parameter):
                        there = type(parameter)(parameter.requires_grad, device)
                    else:
                        there = torch.nn.Parameter(parameter.to(device), parameter.requires_grad)
                    if parameter.grad is not None:
                        there.grad = parameter.grad.to(device)
                    # XLA's tensors are of another kind than the host's, so setting .data is refused.
                    torch.utils.swap_tensors(parameter, there)
            for key, buffer in child._buffers.items():
                if buffer is not None and _is_elsewhere(buffer, device):
                    if id(buffer) not in moved:
                        lazy = is_lazy(buffer)
                        moved[id(buffer)] = (
                            type(buffer)(False, device) if lazy else buffer.to(device)
                        )
                    child._buffers[key] = moved[id(buffer)]


def _is_elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device != device and not tensor.is_meta
