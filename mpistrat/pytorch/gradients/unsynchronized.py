"""Gradients that are in `.grad` but not reduced yet: those of backwards inside `no_sync()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mpistrat.pytorch.modules.registry import ParameterSlot, Registry


class _Split(NamedTuple):
    """A `.grad` that is the sum of a reduced and a local part."""

    combined: torch.Tensor
    version: int
    reduced: torch.Tensor
    local: torch.Tensor


class Unsynchronized:
    """Which `.grad`s of one replica hold contributions that the next reduction must include."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._local: set[ParameterSlot] = set()
        self._splits: dict[ParameterSlot, _Split] = {}

    def set_aside(self, parameters: list[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Take what is reduced out of every `.grad`; returns it by position in `parameters`."""
        aside = {}
        for i, slot, parameter in self._present(parameters):
            gradient = parameter.grad
            if gradient is None:
                self._local.discard(slot)
                self._splits.pop(slot, None)
            elif slot not in self._local:
                aside[i] = gradient
                parameter.grad = None
            elif slot in self._splits:
                split = self._splits.pop(slot)
                if gradient is split.combined and gradient._version == split.version:
                    aside[i] = split.reduced
                    parameter.grad = split.local
                elif gradient.to_dense().any():
                    raise RuntimeError(
                        f"the .grad of {slot.name} mixes reduced and no_sync() gradients, and was changed "
                        "before the next backward(); call zero_grad() before accumulating with no_sync()"
                    )
        return aside

    def keep(self, parameters: list[torch.Tensor | None], aside: dict[int, torch.Tensor]) -> None:
        """After a backward that reduced nothing: put back what was set aside."""
        for i, slot, parameter in self._present(parameters):
            local, reduced = parameter.grad, aside.get(i)
            if local is None:
                parameter.grad = reduced
                continue
            self._local.add(slot)
            if reduced is not None:
                combined = reduced + local
                parameter.grad = combined
                self._splits[slot] = _Split(combined, combined._version, reduced, local)

    def undo(self, parameters: list[torch.Tensor | None], aside: dict[int, torch.Tensor]) -> None:
        """After a backward that failed: forget what it added where nothing is waiting to be reduced."""
        for _, slot, parameter in self._present(parameters):
            if slot not in self._local:
                parameter.grad = None
        self.keep(parameters, aside)

    def _present(
        self, parameters: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[int, ParameterSlot, torch.Tensor]]:
        for i, (slot, parameter) in enumerate(zip(self._registry.slots, parameters, strict=True)):
            if parameter is not None:
                yield i, slot, parameter

    def clear(self) -> None:
        """Everything in `.grad` has been reduced."""
        self._local.clear()
        self._splits.clear()
