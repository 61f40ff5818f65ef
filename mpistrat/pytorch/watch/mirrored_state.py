"""Collects all values that a strategy keeps equal on its replicas: parameters, buffers, optimizer states, variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat import arrays
from mpistrat.context import AnyStrategy
from mpistrat.pytorch.watch.keys import (
    BUFFER,
    OF_GROUP,
    OF_PARAMETER,
    OPTIMIZER,
    PARAMETER,
    VARIABLE,
    Key,
)

if TYPE_CHECKING:
    from mpistrat.pytorch.modules.registry import ParameterSlot
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules


class MirroredThing(NamedTuple):
    """A value that the strategy keeps equal on its replicas: an array, a number, a text, or a tuple of these.

    `copies` has this rank's copies: one if its replicas share the value, otherwise one for each replica.
    """

    name: str
    copies: list[Any]


def mirrored_state(strategy: AnyStrategy) -> dict[Key, MirroredThing]:
    """Return the values that the strategy keeps equal on its replicas, by key.

    Sorted keys give parameters, buffers, optimizers (hyperparameters of parameter groups, then states), variables. A
    module's buffers are left out if a replica has written one of them since the last reduction of gradients, because
    buffers may differ until the next reduction. Parameters and buffers that this rank has dropped are missing, though
    another rank may still have them. Values that may differ are missing, too (`mpistrat.may_differ`, and buffers
    with the rule "local").
    """
    found: dict[Key, MirroredThing] = {}
    modules = strategy.extended.modules.made
    if modules is not None:
        for index, slot, parameter in _slots(modules):
            found[PARAMETER, index] = MirroredThing(slot.name, [parameter])
        found.update(_buffers(modules))
        found.update(_optimizers(modules))
    for number, variable in sorted(strategy.extended.variables.mirrored.items()):
        copies = [component.read_value() for component in variable.values]
        found[VARIABLE, number] = MirroredThing(f"variable {variable.name!r}", copies)
    return found


def _slots(modules: StrategyModules) -> Iterator[tuple[int, ParameterSlot, Any]]:
    """Yield (number, slot, parameter) for each parameter that is kept equal and that this rank has not dropped.

    The slot is the strategy's entry for the parameter, with its name.
    """
    from mpistrat.pytorch.modules.differing import may_differ

    registry = modules.registry
    exempt = may_differ()
    parameters = registry.parameters()
    for index, (slot, parameter) in enumerate(zip(registry.slots, parameters, strict=True)):
        if parameter is not None and id(parameter) not in exempt:
            yield index, slot, parameter


def _buffers(modules: StrategyModules) -> Iterator[tuple[Key, MirroredThing]]:
    from mpistrat.pytorch.modules.differing import may_differ
    from mpistrat.pytorch.virtual_replicas import copies_of_buffers

    exempt = may_differ()
    slots = modules.registry.buffers
    buffers = [*zip(slots, *copies_of_buffers(modules.parts.replicas, slots), strict=True)]
    # A write to one buffer leaves out all buffers of its module, because batch norm does not count its writes to
    # some of its buffers (`mpistrat.pytorch.modules.buffers.snapshot`).
    written = {slot.module for slot, *tensors in buffers if any(map(slot.changed, tensors))}
    for index, (slot, *tensors) in enumerate(buffers):
        if slot.rule == "local" or id(slot.module()) in exempt:
            continue
        if slot.module not in written and all(tensor is not None for tensor in tensors):
            yield (BUFFER, index), MirroredThing(slot.name, tensors)


def _optimizers(modules: StrategyModules) -> Iterator[tuple[Key, MirroredThing]]:
    slots = {id(p): (index, slot.name) for index, slot, p in _slots(modules)}
    for number, optimizer in sorted(modules.reducer.optimizers.items()):
        name = type(optimizer).__name__ + (f" number {number + 1}" if number else "")
        for place, owner, state in _states_of(optimizer, slots):
            for key, value in state.items():
                if is_comparable(value):
                    thing = MirroredThing(f"{name}: {key} of {owner}", [value])
                    yield (OPTIMIZER, number, *place, str(key)), thing


def _states_of(
    optimizer: Any, slots: Mapping[int, tuple[int, str]]
) -> Iterator[tuple[Key, str, dict[Any, Any]]]:
    """Yield (key part, owner's name, values) of an optimizer: hyperparameters by group, then states by parameter.

    Args:
        slots: (number, name) of each mirrored parameter, by `id`. States of other parameters are skipped.
    """
    for g, group in enumerate(optimizer.param_groups):
        members = []
        for parameter in group["params"]:
            if id(parameter) in slots:
                members.append(slots[id(parameter)][0])
        # Ranks may train other parameters each, and send each other the values. Then the groups differ.
        if members or not group["params"]:
            options = {key: value for key, value in group.items() if key != "params"}
            yield (OF_GROUP, g, tuple(members)), f"group {g}", options
    for parameter, state in list(optimizer.state.items()):
        if id(parameter) in slots and isinstance(state, dict):
            index, name = slots[id(parameter)]
            yield (OF_PARAMETER, index), name, state


def is_comparable(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(is_comparable, value))
    return arrays.is_array(value) or isinstance(value, (int, float, complex, str, type(None)))
