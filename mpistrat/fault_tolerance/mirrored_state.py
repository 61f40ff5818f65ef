"""Collects all values that a strategy keeps equal on its replicas: parameters, buffers, optimizer states, variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import arrays

if TYPE_CHECKING:
    from mpistrat.pytorch.modules.registry import ParameterSlot
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules
    from mpistrat.strategy import Strategy

# Key parts, in the order of reports: a difference of a parameter is reported before one of an optimizer.
_PARAMETER, _BUFFER, _OPTIMIZER, _VARIABLE = range(4)
_OF_GROUP, _OF_PARAMETER = range(2)

Key = tuple[Any, ...]  # equal for the same value on every rank; keys sort in the order of reports


class MirroredThing(NamedTuple):
    """A value that the strategy keeps equal on its replicas: an array, a number, a text, or a tuple of these.

    `copies` has this rank's copies: one if its replicas share the value, otherwise one for each replica.
    """

    name: str
    copies: list[Any]


def mirrored_state(strategy: Strategy) -> dict[Key, MirroredThing]:
    """Return the values that the strategy keeps equal on its replicas, by key.

    Sorted keys give parameters, buffers, optimizers (hyperparameters of parameter groups, then states), variables. A
    module's buffers are left out if a replica has written one of them since the last reduction of gradients, because
    buffers may differ until the next reduction. Parameters and buffers that this rank has dropped are missing, though
    another rank may still have them.
    """
    found: dict[Key, MirroredThing] = {}
    modules = strategy.extended.modules.made
    if modules is not None:
        for index, slot, parameter in _slots(modules):
            found[_PARAMETER, index] = MirroredThing(slot.name, [parameter])
        found.update(_buffers(modules))
        found.update(_optimizers(modules))
    for number, variable in sorted(strategy.extended.variables.mirrored.items()):
        copies = [component.read_value() for component in variable.values]
        found[_VARIABLE, number] = MirroredThing(f"variable {variable.name!r}", copies)
    return found


def _slots(modules: StrategyModules) -> Iterator[tuple[int, ParameterSlot, Any]]:
    """Yield (number, slot, parameter) for each mirrored parameter that this rank has not dropped.

    The slot is the strategy's entry for the parameter, with its name.
    """
    registry = modules.registry
    parameters = registry.parameters()
    for index, (slot, parameter) in enumerate(zip(registry.slots, parameters, strict=True)):
        if parameter is not None:
            yield index, slot, parameter


def _buffers(modules: StrategyModules) -> Iterator[tuple[Key, MirroredThing]]:
    from mpistrat.pytorch.virtual_replicas import copies_of_buffers

    slots = modules.registry.buffers
    buffers = [*zip(slots, *copies_of_buffers(modules.parts.replicas, slots), strict=True)]
    # A write to one buffer leaves out all buffers of its module, because batch norm does not count its writes to
    # some of its buffers (`mpistrat.pytorch.modules.buffers.snapshot`).
    written = {slot.module for slot, *tensors in buffers if any(map(slot.changed, tensors))}
    for index, (slot, *tensors) in enumerate(buffers):
        if slot.module not in written and all(tensor is not None for tensor in tensors):
            yield (_BUFFER, index), MirroredThing(slot.name, tensors)


def _optimizers(modules: StrategyModules) -> Iterator[tuple[Key, MirroredThing]]:
    slots = {id(p): (index, slot.name) for index, slot, p in _slots(modules)}
    for number, optimizer in sorted(modules.reducer.optimizers.items()):
        name = type(optimizer).__name__ + (f" number {number + 1}" if number else "")
        for place, owner, state in _states_of(optimizer, slots):
            for key, value in state.items():
                if _is_comparable(value):
                    thing = MirroredThing(f"{name}: {key} of {owner}", [value])
                    yield (_OPTIMIZER, number, *place, str(key)), thing


def _states_of(
    optimizer: Any, slots: Mapping[int, tuple[int, str]]
) -> Iterator[tuple[Key, str, dict[Any, Any]]]:
    """Yield (key part, owner's name, values) of an optimizer: hyperparameters by group, then states by parameter.

    Args:
        slots: (number, name) of each mirrored parameter, by `id`. States of other parameters are skipped.
    """
    for g, group in enumerate(optimizer.param_groups):
        yield (_OF_GROUP, g), f"group {g}", {k: v for k, v in group.items() if k != "params"}
    for parameter, state in list(optimizer.state.items()):
        if id(parameter) in slots and isinstance(state, dict):
            index, name = slots[id(parameter)]
            yield (_OF_PARAMETER, index), name, state


def _is_comparable(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_comparable, value))
    return arrays.is_array(value) or isinstance(value, (int, float, complex, str, type(None)))
