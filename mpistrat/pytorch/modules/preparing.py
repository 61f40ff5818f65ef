"""Checks of the modules, optimizers and schedulers that a program gives to `Strategy.prepare` together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.nn import Module
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
_PARAMETER = "parameter "
Lines: TypeAlias = dict[Any, str]  # texts that must be equal on all ranks, by a key
_OF_EVERY_SCHEDULER = ("last_epoch", "_step_count", "base_lrs", "_last_lr")


def not_mirrored(owner: StrategyModules, modules: Iterable[Module]) -> list[Module]:
    """Return the modules that `prepare` has to mirror.

    They were made outside the strategy's scope, or have a parameter or buffer that is not mirrored.
    Args:
        owner: the strategy's record of its modules.
        modules: the modules to look at.
    Returns: each such module once, in the order of `modules`; [] if all are mirrored.
    """
    return [
        module
        for module in dict.fromkeys(modules)
        if not owner.has_made(module) or any(owner.registry.new_in(module))
    ]


def check_optimizers(
    owner: StrategyModules, optimizers: Iterable[Optimizer], modules: Sequence[Module]
) -> None:
    """Check that each optimizer trains the modules that are given to `prepare` with it.

    Args:
        owner: the strategy's record of its modules.
        modules: the modules in the same call of `prepare`.
    Raises: ValueError if an optimizer has a trainable parameter that is not in `modules`, not mirrored and no DTensor;
        or if no trainable parameter of it is in `modules`, though there are some.
    """
    prepared: set[torch.Tensor] = set()
    for module in modules:
        prepared.update(module.parameters())
    for optimizer in optimizers:
        trained = [p for p in hooks.parameters_of(optimizer) if p.requires_grad]
        others = set(trained) - prepared
        unmirrored = [p for p in others if p not in owner.registry]
        unknown = [p for p in unmirrored if not is_sharded(p)]
        if unknown or (prepared and trained and prepared.isdisjoint(trained)):
            kind = type(optimizer).__name__
            classes = {type(module).__name__ for module in modules}
            names = ", ".join(sorted(classes)) or "none"
            number = len(trained)
            raise ValueError(
                f"the {kind} has {number} parameters, {number - len(others)} of them in modules that "
                f"are prepared with it ({names}), and {len(unknown)} in none that is "
                f"mirrored. Make the {kind} after copy.deepcopy, convert_sync_batchnorm and other calls that make new "
                "parameters, and give prepare the trained module, too"
            )


def check_alike(
    extended: StrategyExtended, objects: Mapping[str, Any], purpose: Purpose = "use"
) -> None:
    """Compare the optimizers, schedulers and gradient scalers of all ranks, because each rank has made its own.

    The ranks compare parameters, options and numbers of steps of optimizers, and the state of schedulers and scalers;
    numbers to six digits. Nothing is read from an accelerator but the state of a gradient scaler.
    Called by: every rank. Collective if `objects` has an object to compare.
    Args:
        objects: the objects by name; other kinds are skipped.
        purpose: "restore" compares only the parameters of optimizers, because a restore replaces all other state. "use"
            allows different optimizers if no two ranks have a parameter in common (`ZeroRedundancyOptimizer`). "save"
            compares everything.
    Raises: ValueError on all ranks, if an object differs between ranks.
    """
    kinds = Optimizer if purpose == "restore" else (Optimizer, LRScheduler, torch.amp.GradScaler)
    found = {name: value for name, value in objects.items() if isinstance(value, kinds)}
    communicator = extended.communicator
    if not found or communicator.size == 1:
        return
    modules = extended.modules.get()
    lines: Lines = {}
    with communicator.raising_together():
        for name, value in found.items():
            kind = type(value).__name__
            for subject, state in _described(value, extended, purpose):
                lines[name, subject] = f"{subject} of {kind} ({name}) {state}"
    of_ranks = of_all(communicator, lines, "optimizers, schedulers and gradient scalers")
    if of_ranks and not (purpose == "use" and _are_dealt_out(of_ranks)):
        _, difference = first_difference(of_ranks)
        error = ValueError(
            f"{difference}. Optimizers, schedulers and gradient scalers must be alike on "
            "all ranks: give each rank the same parameters in the same order (a set of names has another order in each "
            "process: sort it), the same options, loaded states and metrics"
        )
        mark_raised_by_all(error)
        raise error
    for value in found.values():
        modules.compared.setdefault(value, next(modules.numbers))


def of_all(communicator: Communicator, lines: Lines, label: str) -> list[Lines]:
    """Compare `lines` over the ranks by their SHA-256, and gather them only if they differ. Collective.

    Args: label: the call's name in reports.
    Returns: each rank's lines, by rank; an empty list if all ranks have equal lines, in any order.
    """
    text = repr(sorted(lines.items()))
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = communicator.all_gather_object(digest, label=label)
    if len(set(digests)) == 1:
        return []
    return communicator.all_gather_object(lines, label=label)


def first_difference(of_ranks: list[Lines]) -> tuple[Any, str]:
    """Return the key of the first line that differs from rank 0's, and a text for a message.

    Args: of_ranks: each rank's lines; a missing line counts as "nothing".
    Returns: the key; and rank 0's line with the line of the lowest rank that differs.
    Raises: ValueError if all ranks have the same lines.
    """
    for of_rank in of_ranks:
        for key in of_rank:
            first = of_ranks[0].get(key, "nothing")
            for rank, lines in enumerate(of_ranks):
                line = lines.get(key, "nothing")
                if line != first:
                    return key, f"{first} on rank 0, and {line} on rank {rank}"
    raise ValueError("all ranks have the same lines")


def _are_dealt_out(of_ranks: list[Lines]) -> bool:
    """Whether each parameter in optimizers is in the optimizers of only one rank, as with `ZeroRedundancyOptimizer`.

    False if there are no parameters. Args: of_ranks: each rank's lines.
    """
    owned: list[str] = []
    for lines in of_ranks:
        of_parameters = [line for line in lines.values() if line.startswith(_PARAMETER)]
        owned += {line.split(" is ")[1] for line in of_parameters}
    return 0 < len(owned) == len(set(owned))


def _described(
    value: Any, extended: StrategyExtended, purpose: Purpose
) -> Iterator[tuple[str, str]]:
    """Yield pairs of a subject and its state, such as "lr of group 0" and "is 0.1", that must be equal on all ranks."""
    if not isinstance(value, Optimizer):
        yield from _plain(numbers_of(value), "")
        return
    size = extended.communicator.size
    slots = extended.modules.get().registry.slots
    names = {}
    for i, slot in enumerate(slots):
        names[id(slot.reference())] = f"{slot.name} (number {i})"
    for g, group in enumerate(value.param_groups):
        # Torch may have sharded a parameter over some of the ranks: the other ranks do not have it.
        whole = [p for p in group["params"] if not is_sharded(p) or p.device_mesh.size() == size]
        for i, p in enumerate(whole):
            name = names.get(id(p)) or _kind_of(p)
            yield f"{_PARAMETER}{i} of group {g}", f"is {name}"
        if purpose != "restore" and (whole or not group["params"]):
            yield from _plain({**group, "params": len(whole)}, f" of group {g}")
            yield f"group {g}", f"has {_steps_of(value, whole)}"


def _kind_of(parameter: torch.Tensor) -> str:
    return "lazy" if is_lazy(parameter) else f"{parameter.dtype}{list(parameter.shape)}"


def _plain(state: Mapping[str, Any], of: str) -> Iterator[tuple[str, str]]:
    for key, value in with_six_digits(state).items():
        yield f"{key}{of}", f"is {value}"


def with_six_digits(value: Any) -> Any:
    """Return `value` as JSON holds it. Floats have six digits, because last bits depend on the processor."""
    text = json.dumps(value, default=numbers_of, skipkeys=True)
    return json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))


def numbers_of(value: Any) -> Any:
    """Return `value` in a form that JSON can hold; None for values that are not compared, such as functions.

    A scaler gives its state, a scheduler its attributes, and a tensor of one number on the host that number.
    """
    if isinstance(value, torch.amp.GradScaler):
        return value.state_dict()
    if isinstance(value, LRScheduler):
        # A scheduler of the program may keep its rank. The last bits of `best`, a metric, depend on the GPU.
        is_of_torch = type(value).__module__.startswith("torch.")
        state = vars(value)
        kept = state.keys() - {"best"} if is_of_torch else _OF_EVERY_SCHEDULER
        return {key: state[key] for key in state if key in kept}
    if type(value) is torch.Tensor and value.is_cpu and value.numel() == 1:
        return value.item()
    return None


def _steps_of(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> str:
    states = [state for p in parameters if (state := optimizer.state.get(p))]
    steps = [step for state in states if (step := state.get("step")) is not None]
    on_host = [float(step) for step in steps if not is_on_accelerator(step)]
    made = f" after {max(on_host):g} steps" if on_host else ""
    return f"the state of {len(states)} parameters{made}"
