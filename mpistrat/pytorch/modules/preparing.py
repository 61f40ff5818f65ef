"""Modules and optimizers that a program prepares together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mpistrat import arrays
from mpistrat.pytorch import hooks

if TYPE_CHECKING:
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules


def not_mirrored(
    owner: StrategyModules, modules: Iterable[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Those of `modules` that have something which is not mirrored yet, each once."""
    return [module for module in dict.fromkeys(modules) if not _is_mirrored(owner, module)]


def _is_mirrored(owner: StrategyModules, module: torch.nn.Module) -> bool:
    registry = owner.registry
    return (
        owner.has_made(module)
        and all(p in registry or arrays.is_sharded(p) for p in module.parameters())
        and all(
            buffer is None or arrays.is_sharded(buffer) or registry.buffer(child, key) is not None
            for child in module.modules()
            for key, buffer in child._buffers.items()
        )
    )


def check_optimizers(
    owner: StrategyModules,
    optimizers: Iterable[torch.optim.Optimizer],
    modules: Sequence[torch.nn.Module],
) -> None:
    """Raises: ValueError: an optimizer updates what nobody keeps equal, or nothing of the modules that it came with."""
    theirs = {id(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        own = [p for p in hooks.parameters_of(optimizer) if p.requires_grad]
        unknown = [
            p for p in own if not (id(p) in theirs or p in owner.registry or arrays.is_sharded(p))
        ]
        if unknown or (theirs and own and theirs.isdisjoint(map(id, own))):
            kind, names = type(optimizer).__name__, {type(module).__name__ for module in modules}
            raise ValueError(
                f"the {kind} has {len(own)} parameters, {sum(id(p) in theirs for p in own)} of them in modules that "
                f"are prepared with it ({', '.join(sorted(names)) or 'none'}), and {len(unknown)} in none that is "
                f"mirrored. Make the {kind} of the parameters of the module that is trained, after copy.deepcopy, "
                "convert_sync_batchnorm and whatever else makes others, and give prepare that module, too"
            )
