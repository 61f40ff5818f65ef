"""The table of all that the watch compares: mirrored tensors, optimizers, schedulers, and training flags."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LRScheduler

from mpistrat.pytorch.modules.differing import may_differ
from mpistrat.pytorch.modules.preparing import numbers_of
from mpistrat.pytorch.watch.keys import OF_PARAMETER, OPTIMIZER, SCHEDULER, TRAINING, VARIABLE, Key
from mpistrat.pytorch.watch.mirrored_state import MirroredThing, is_comparable, mirrored_state

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.reducer import GradientReducer
    from mpistrat.pytorch.modules.strategy_modules import StrategyModules

Things = dict[Key, MirroredThing]


class Schedulers:
    """The schedulers that have stepped, with a key for each that is equal on all ranks."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._keys: weakref.WeakKeyDictionary[LRScheduler, Key] = weakref.WeakKeyDictionary()

    def add(self, scheduler: LRScheduler) -> None:
        """Called by: the hook before each step of a scheduler."""
        if scheduler in self._keys:
            return
        kind: Key = (type(scheduler).__name__,)
        for number, optimizer in self._reducer.optimizers.items():
            if optimizer is scheduler.optimizer:
                kind += (number,)
        alike = [key for key in self._keys.values() if key[:-1] == kind]
        self._keys[scheduler] = (*kind, len(alike))

    def things(self) -> Things:
        found: Things = {}
        for scheduler, key in list(self._keys.items()):
            for name, value in numbers_of(scheduler).items():
                if is_comparable(value):
                    described = f"{name} of {type(scheduler).__name__}"
                    thing = MirroredThing(described, [value])
                    found[(SCHEDULER, *key, name)] = thing
        return found


def training_flags(roots: Iterable[torch.nn.Module]) -> Things:
    """Return whether each module in `roots` is in training mode."""
    found: Things = {}
    exempt = may_differ()
    for number, root in enumerate(roots):
        for path, module in root.named_modules(prefix=type(root).__name__):
            if id(module) not in exempt:
                thing = MirroredThing(f"{path}.training", [module.training])
                found[TRAINING, number, path] = thing
    return found


def tensors_and_options(modules: StrategyModules) -> Things:
    """Return the mirrored tensors that must be equal after a step, and the options of optimizers.

    The ranks of a node may share parameters. Then there is no tensor, because another rank may still write. A state of
    a program's own optimizer is left out, because it may belong to one rank.
    """
    found: Things = {}
    optimizers = modules.reducer.optimizers
    shares = modules.reducer.slice_steps is not None
    for key, thing in sorted(mirrored_state(modules.parts.strategy).items()):
        left_out = key[0] == VARIABLE
        if isinstance(thing.copies[0], torch.Tensor):
            left_out = left_out or shares
        if key[0] == OPTIMIZER and key[2] == OF_PARAMETER:
            module = type(optimizers.get(key[1])).__module__
            left_out = left_out or not module.startswith("torch.")
        if not left_out:
            found[key] = thing
    return found
