"""The table of all values that are compared, because a strategy or the program keeps them equal on all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mpistrat import arrays, nest
from mpistrat.context import AnyStrategy
from mpistrat.pytorch.modules.differing import may_differ
from mpistrat.pytorch.watch.keys import (
    BUFFER,
    OF_GROUP,
    OF_PARAMETER,
    OPTIMIZER,
    PARAMETER,
    SCALER,
    SCHEDULER,
    TRAINING,
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


State: TypeAlias = dict[Key, MirroredThing]


def mirrored_state(strategy: AnyStrategy) -> State:
    """Return the values that the strategy keeps equal on its replicas, by key.

    Sorted keys give parameters, buffers, optimizers (hyperparameters of parameter groups, then states), variables,
    schedulers and gradient scalers. A module's buffers are left out if a replica has written one of them since the last
    reduction of gradients, because buffers may differ until the next reduction. Parameters and buffers that this rank
    has dropped are missing, though another rank may still have them. Values that may differ are missing, too
    (`mpistrat.may_differ`, and buffers with the rule "local").
    """
    found: State = {}
    modules = strategy.extended.modules.made
    if modules is not None:
        for index, slot, parameter in _slots(modules):
            found[PARAMETER, index] = MirroredThing(slot.name, [parameter])
        found.update(_buffers(modules))
        found.update(_optimizers(modules))
        found.update(_schedulers_and_scalers(modules))
    for number, variable in sorted(strategy.extended.variables.mirrored.items()):
        copies = [component.read_value() for component in variable.values]
        found[VARIABLE, number] = MirroredThing(f"variable {variable.name!r}", copies)
    return found


def state_after_step(modules: StrategyModules, roots: Iterable[Any]) -> State:
    """Return the values that must be equal after a step, in the order of keys.

    Variables are left out, because the program may be about to write them. Training flags of `roots`, the outermost
    modules, are added.
    """
    found: State = {}
    for key, thing in _watched(modules.parts.strategy):
        if key[0] != VARIABLE:
            found[key] = thing
    exempt = may_differ()
    slots = {id(parameter): index for index, _, parameter in _slots(modules)}
    for root in roots:
        # The slot tells modules apart. A rank may keep modules that other ranks have dropped.
        numbers = []
        for parameter in root.parameters():
            if id(parameter) in slots:
                numbers.append(slots[id(parameter)])
        for path, module in root.named_modules(prefix=type(root).__name__):
            if numbers and id(module) not in exempt:
                thing = MirroredThing(f"{path}.training", [module.training])
                found[TRAINING, numbers[0], path] = thing
    return found


def state_at_save(strategy: AnyStrategy, saved: Any) -> State:
    """Return the arrays that must be equal at a save, in the order of keys: variables, and tensors in `saved`."""
    found: State = {}
    addresses = {leaf.data_ptr() for leaf in nest.flatten(saved) if arrays.is_torch(leaf)}
    for key, thing in _watched(strategy):
        value = thing.copies[0]
        is_saved = not arrays.is_torch(value) or value.data_ptr() in addresses
        if is_saved and arrays.is_array(value):
            found[key] = thing
    return found


def _watched(strategy: AnyStrategy) -> Iterator[tuple[Key, MirroredThing]]:
    """Yield the values of `mirrored_state` that are equal in each program that is right, in the order of keys.

    The ranks of a node may share parameters. Then there is no tensor, because another rank may still write. A state of
    a program's own optimizer is left out, because it may belong to one rank.
    """
    modules = strategy.extended.modules.made
    shares = modules is not None and modules.reducer.slice_steps is not None
    for key, thing in sorted(mirrored_state(strategy).items()):
        left_out = shares and arrays.is_torch(thing.copies[0])
        if key[0] == OPTIMIZER and key[2] == OF_PARAMETER:
            module = type(modules.reducer.optimizers.get(key[1])).__module__
            left_out |= not module.startswith("torch.")
        if not left_out:
            yield key, thing


def _slots(modules: StrategyModules) -> Iterator[tuple[int, ParameterSlot, Any]]:
    """Yield (number, slot, parameter) for each parameter that is kept equal and that this rank has not dropped.

    The slot is the strategy's entry for the parameter, with its name.
    """
    exempt = may_differ()
    for index, slot in enumerate(modules.registry.slots):
        parameter = slot.reference()
        if parameter is not None and id(parameter) not in exempt:
            yield index, slot, parameter


def _buffers(modules: StrategyModules) -> Iterator[tuple[Key, MirroredThing]]:
    from mpistrat.pytorch.virtual_replicas import copies_of_buffers

    exempt = may_differ()
    slots = modules.registry.buffers
    copies = copies_of_buffers(modules.parts.replicas, slots)
    buffers = list(zip(slots, *copies, strict=True))
    # A write to one buffer leaves out all buffers of its module, because batch norm does not count its writes to
    # some of its buffers (`mpistrat.pytorch.modules.buffers.snapshot`).
    written = set()
    for slot, *tensors in buffers:
        if any(slot.changed(tensor) for tensor in tensors):
            written.add(slot.module)
    for index, (slot, *tensors) in enumerate(buffers):
        if slot.rule == "local" or id(slot.module()) in exempt:
            continue
        if slot.module not in written and all(tensor is not None for tensor in tensors):
            yield (BUFFER, index), MirroredThing(slot.name, tensors)


def _optimizers(modules: StrategyModules) -> Iterator[tuple[Key, MirroredThing]]:
    slots = {id(p): (index, slot.name) for index, slot, p in _slots(modules)}
    for number, optimizer in sorted(modules.reducer.optimizers.items()):
        name = type(optimizer).__name__
        if number:
            name += f" number {number + 1}"
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
            # Other entries, such as a time, are the program's own.
            options = {key: group.get(key) for key in optimizer.defaults}
            yield (OF_GROUP, g, tuple(members)), f"group {g}", options
    for parameter, state in list(optimizer.state.items()):
        if id(parameter) in slots and isinstance(state, dict):
            index, name = slots[id(parameter)]
            yield (OF_PARAMETER, index), name, state


def _schedulers_and_scalers(modules: StrategyModules) -> Iterator[tuple[Key, MirroredThing]]:
    """Yield the states of gradient scalers, and of schedulers that have stepped.

    A scheduler may belong to one rank alone, and a plateau may step by a rank's own metric, if ranks then send each
    other the rate.
    """
    from torch.amp import GradScaler
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    from mpistrat.pytorch.modules.preparing import numbers_of, with_six_digits

    for value, number in list(modules.compared.items()):
        kind = SCHEDULER
        state: Mapping[str, Any] = {}
        if isinstance(value, GradScaler):
            kind = SCALER
            state = vars(value)  # with tensors, because numbers would wait for a device
        elif isinstance(value, LRScheduler) and not isinstance(value, ReduceLROnPlateau):
            # Some of torch's schedulers do not count.
            has_stepped = getattr(value, "_step_count", 2) > 1
            state = with_six_digits(numbers_of(value)) if has_stepped else {}
        for key, entry in state.items():
            # `_init_scale` and such are of no use once the scaler has stepped.
            if is_comparable(entry) and not key.startswith("_init"):
                name = f"{key.strip('_')} of {type(value).__name__}"
                thing = MirroredThing(name, [entry])
                yield (kind, number, key), thing


def is_comparable(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(is_comparable(part) for part in value)
    is_plain = isinstance(value, (int, float, complex, str, type(None)))
    return is_plain or arrays.is_array(value)
