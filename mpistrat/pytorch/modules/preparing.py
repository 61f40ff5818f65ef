"""Modules and optimizers that a program prepares together."""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mpistrat.arrays import is_on_accelerator, is_sharded
from mpistrat.communicators import Communicator
from mpistrat.communicators.contract.joint_errors import mark_raised_by_all
from mpistrat.pytorch import hooks

if TYPE_CHECKING:
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules
    from mpistrat.replicas.strategy_extended import StrategyExtended

Purpose = Literal["use", "save", "restore"]
# Those that ranks have found to be alike; they are not compared once more when they step.
compared: weakref.WeakSet[Any] = weakref.WeakSet()
_OF_EVERY_SCHEDULER = ("last_epoch", "_step_count", "base_lrs", "_last_lr")


def not_mirrored(
    owner: StrategyModules, modules: Iterable[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Those of `modules` that have something which is not mirrored yet, each once."""
    return [module for module in dict.fromkeys(modules) if not _is_mirrored(owner, module)]


def _is_mirrored(owner: StrategyModules, module: torch.nn.Module) -> bool:
    registry = owner.registry
    return (
        owner.has_made(module)
        and all(p in registry or is_sharded(p) for p in module.parameters())
        and all(
            buffer is None or is_sharded(buffer) or registry.buffer(child, key) is not None
            for child in module.modules()
            for key, buffer in child._buffers.items()
        )
    )


def check_optimizers(
    owner: StrategyModules,
    optimizers: Iterable[Optimizer],
    modules: Sequence[torch.nn.Module],
) -> None:
    """Raises: ValueError: an optimizer updates what nobody keeps equal, or nothing of the modules that it came with."""
    theirs = {id(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        own = [p for p in hooks.parameters_of(optimizer) if p.requires_grad]
        unknown = [p for p in own if not (id(p) in theirs or p in owner.registry or is_sharded(p))]
        if unknown or (theirs and own and theirs.isdisjoint(map(id, own))):
            kind, names = type(optimizer).__name__, {type(module).__name__ for module in modules}
            raise ValueError(
                f"the {kind} has {len(own)} parameters, {sum(id(p) in theirs for p in own)} of them in modules that "
                f"are prepared with it ({', '.join(sorted(names)) or 'none'}), and {len(unknown)} in none that is "
                f"mirrored. Make the {kind} of the parameters of the module that is trained, after copy.deepcopy, "
                "convert_sync_batchnorm and whatever else makes others, and give prepare that module, too"
            )


def check_alike(
    extended: StrategyExtended, objects: Mapping[str, Any], purpose: Purpose = "use"
) -> None:
    """Compare the optimizers, schedulers and gradient scalers among `objects`: each rank has made its own.

    Called by: every rank. Nothing is read from an accelerator but the state of a gradient scaler.
    Args:
        objects: by name.
        purpose: what comes next. To "restore" gives states back by the positions of parameters, and replaces all else:
            only parameters are compared. To "use" optimizers, no parameter may be in those of two ranks, either:
            `ZeroRedundancyOptimizer` deals them out.
    Raises: ValueError on all ranks, where they differ.
    """
    kinds = Optimizer if purpose == "restore" else (Optimizer, LRScheduler, torch.amp.GradScaler)
    found = {f"{type(v).__name__} ({n})": v for n, v in objects.items() if isinstance(v, kinds)}
    communicator = extended.communicator
    if not found or communicator.size == 1:
        return
    with communicator.raising_together():
        lines = [s for n, v in found.items() for s in _described(n, v, extended, purpose)]
    everyone = of_all(communicator, lines, "optimizers, schedulers and gradient scalers")
    if not everyone or (purpose == "use" and _are_dealt_out(everyone)):
        compared.update(found.values())
        return
    _, first, other, rank = first_difference(everyone)
    error = ValueError(
        f"{first} on rank 0, and {other} on rank {rank}. Optimizers, schedulers and gradient scalers must be alike on "
        "all ranks: give each rank the same parameters in the same order (a set of names has another order in each "
        "process: sort it), the same options, loaded states and metrics"
    )
    mark_raised_by_all(error)
    raise error


def of_all(communicator: Communicator, lines: list[str], label: str) -> list[list[str]]:
    """The lines of all ranks; nothing where they are equal, which digests tell. Called by: every rank."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(communicator.all_gather_object(digest, label=label))) == 1:
        return []
    return communicator.all_gather_object(lines, label=label)


def first_difference(everyone: list[list[str]]) -> tuple[int, str, str, int]:
    """The number of the first line that differs, rank 0's, the line of the first rank with another, and that rank."""
    columns = enumerate(itertools.zip_longest(*everyone, fillvalue="nothing"))
    number, column = next((i, column) for i, column in columns if len(set(column)) > 1)
    rank = next(rank for rank, line in enumerate(column) if line != column[0])
    return number, column[0], column[rank], rank


def _are_dealt_out(everyone: list[list[str]]) -> bool:
    """Whether no parameter is in the optimizers of two ranks, as `ZeroRedundancyOptimizer` has it."""
    owned = [{s.split(" is ")[1] for s in own if s.startswith("parameter ")} for own in everyone]
    return any(owned) and not any(a & b for a, b in itertools.combinations(owned, 2))


def _described(
    name: str, value: Any, extended: StrategyExtended, purpose: Purpose
) -> Iterator[str]:
    """Lines that must be equal on all ranks."""
    if not isinstance(value, Optimizer):
        yield from _plain(name, _simple(value))
        return
    modules, size = extended.modules.made, extended.communicator.size
    slots = [] if modules is None else modules.registry.slots
    names = {id(slot.reference()): f"{slot.name} (number {i})" for i, slot in enumerate(slots)}
    for g, group in enumerate(value.param_groups):
        # Torch may have sharded some over a part of the ranks: others have none of them.
        own = [p for p in group["params"] if not is_sharded(p) or p.device_mesh.size() == size]
        for i, p in enumerate(own):
            known = names.get(id(p)) or ("lazy" if is_lazy(p) else f"{p.dtype}{list(p.shape)}")
            yield f"parameter {i} of group {g} of {name} is {known}"
        if purpose != "restore" and (own or not group["params"]):
            yield from _plain(f"group {g} of {name}", {**group, "params": len(own)})
            yield f"group {g} of {name} has {_steps_of(value, own)}"


def _plain(owner: str, state: Mapping[str, Any]) -> Iterator[str]:
    """The strings of `state`, and its numbers to six digits: the last bits of a cosine depend on the processor."""
    for key, value in state.items():
        text = json.dumps(value, default=_simple, skipkeys=True)
        short = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
        yield f"{key} of {owner} is {short}"


def _simple(value: Any) -> Any:
    """`value` as JSON may have it; None for what may differ, such as a function or another object."""
    if isinstance(value, torch.amp.GradScaler):
        return value.state_dict()
    if isinstance(value, LRScheduler):
        # One of the program's own may keep its rank. The last bits of a metric depend on the GPU.
        is_of_torch = type(value).__module__.startswith("torch.")
        kept = vars(value).keys() - {"best"} if is_of_torch else _OF_EVERY_SCHEDULER
        return {key: own for key, own in vars(value).items() if key in kept}
    is_number = type(value) is torch.Tensor and value.is_cpu and value.numel() == 1
    return value.item() if is_number else None


def _steps_of(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> str:
    states = [state for p in parameters if (state := optimizer.state.get(p))]
    steps = [s["step"] for s in states if "step" in s and not is_on_accelerator(s["step"])]
    made = f" after {max(map(float, steps)):g} steps" if steps else ""
    return f"the state of {len(states)} parameters{made}"
