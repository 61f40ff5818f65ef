"""Modules and optimizers that a program prepares together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from mpistrat import arrays
from mpistrat.communicators import Communicator
from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
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


def check_same_steps(
    communicator: Communicator, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Called by: every rank. Raises: ValueError on all, if one alone has loaded the state of an optimizer."""
    mine = [_steps_of(optimizer) for optimizer in optimizers]
    everyone = communicator.all_gather_object(mine, label="optimizers that are prepared")
    for rank, theirs in enumerate(everyone):
        for ours, other in zip(everyone[0], theirs, strict=False):
            if other != ours:
                error = ValueError(
                    f"an optimizer has {ours} on rank 0 and {other} on rank {rank}: states of optimizers are not "
                    "mirrored. Load them on every rank"
                )
                mark_raised_by_all(error)
                raise error


def _steps_of(optimizer: torch.optim.Optimizer) -> str:
    states = [state for state in optimizer.state.values() if state]
    steps = {float(state["step"]) for state in states if "step" in state}
    made = f" after {max(steps):g} steps" if steps else ""
    return f"the state of {len(states)} parameters{made}"
