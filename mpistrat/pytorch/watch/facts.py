"""Facts about optimizer steps that a rank notes by itself, without a message. They may be causes of a drift."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from mpistrat.pytorch.modules.registry import version
from mpistrat.pytorch.watch import drift

if TYPE_CHECKING:
    import torch

    from mpistrat.pytorch.gradients.reducer import GradientReducer

_EVERY = 1000


def is_due(number: int) -> bool:
    """Whether `number` is 1, 2, 4, 8 and so on, or a multiple of 1000."""
    return number & (number - 1) == 0 or number % _EVERY == 0


class Facts:
    """The facts that this rank has noted since the last samples.

    Args: reducer: the strategy's.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._found: dict[str, str] = {}
        # The number of reductions at the end of each optimizer's last step.
        self._reductions = weakref.WeakKeyDictionary[Optimizer, int]()
        self._unreduced_steps = 0
        self._versions: list[int] = []  # of each parameter, when `note_versions` was called

    def parameters(self) -> list[torch.Tensor | None]:
        """Return the parameters by slot; [] if the ranks of a node share them, so that another rank may write them."""
        if self._reducer.slice_steps is not None:
            return []
        return self._reducer.registry.parameters()

    def before_step(self, optimizer: Optimizer) -> bool:
        """Note facts about the step that begins. Returns: whether samples are due after it.

        A step without a reduction since the optimizer's step before is due if it is the 1st, 2nd, 4th, … such step.
        """
        step = self._reducer.steps + 1
        due = is_due(step)
        is_unreduced = self._reductions.get(optimizer, 0) == self._reducer.reductions
        if is_unreduced:
            self._unreduced_steps += 1
            due = due or is_due(self._unreduced_steps)
        if not due and not self._versions:
            return False
        if self._reducer.has_local:
            self._found.setdefault(drift.LOCAL, str(step))
        elif is_unreduced:
            self._found.setdefault(drift.UNREDUCED, str(step))
        if self._versions:
            parameters = self.parameters()
            slots = self._reducer.registry.slots
            for i, before in enumerate(self._versions):
                if before != version(parameters[i]):
                    self._found.setdefault(drift.WRITTEN, slots[i].name)
            self._versions = []
        return due

    def after_step(self, optimizer: Optimizer) -> None:
        self._reductions[optimizer] = self._reducer.reductions
        if is_due(self._reducer.steps + 1):
            self.note_versions()

    def note_versions(self) -> None:
        """Note how often each parameter was written. The next step compares.

        Called by: the end of a step before a due step, of a loader, and of each mirroring.
        """
        self._versions = [version(parameter) for parameter in self.parameters()]

    def taken(self) -> dict[str, str]:
        """Return the facts, and begin anew. Of each kind there is the first case."""
        found = self._found
        self._found = {}
        return found
