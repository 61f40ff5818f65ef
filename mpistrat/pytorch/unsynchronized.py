"""Gradients that are in `.grad` but not reduced yet: those of backwards inside `no_sync()`."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class _Split:
    """A `.grad` that is the sum of a reduced and a local part."""

    combined: torch.Tensor
    version: int
    reduced: torch.Tensor
    local: torch.Tensor


class Unsynchronized:
    """Which `.grad`s of one replica hold contributions that the next reduction must include."""

    def __init__(self) -> None:
        self._local: set[int] = set()
        self._splits: dict[int, _Split] = {}

    def set_aside(
        self, parameters: list[torch.Tensor | None], synchronizes: bool
    ) -> dict[int, torch.Tensor]:
        """Take what is reduced out of every `.grad`; returns it by slot."""
        aside = {}
        for slot, parameter in enumerate(parameters):
            if parameter is None:
                continue
            gradient = parameter.grad
            if gradient is None:
                self._local.discard(slot)
                self._splits.pop(slot, None)
            elif slot not in self._local:
                aside[slot] = gradient
                parameter.grad = None
            elif slot in self._splits:
                split = self._splits.pop(slot)
                if gradient is split.combined and gradient._version == split.version:
                    aside[slot] = split.reduced
                    parameter.grad = split.local
                elif gradient.count_nonzero():
                    raise RuntimeError(
                        "a .grad that mixes reduced and no_sync() gradients was changed before the next "
                        "backward(); call zero_grad() before accumulating with no_sync()"
                    )
        return aside

    def keep(self, parameters: list[torch.Tensor | None], aside: dict[int, torch.Tensor]) -> None:
        """After a backward that reduced nothing: put back what was set aside."""
        for slot, parameter in enumerate(parameters):
            if parameter is None:
                continue
            local, reduced = parameter.grad, aside.get(slot)
            if local is None:
                parameter.grad = reduced
                continue
            self._local.add(slot)
            if reduced is not None:
                combined = reduced + local
                parameter.grad = combined
                self._splits[slot] = _Split(combined, combined._version, reduced, local)

    def clear(self) -> None:
        self._local.clear()
        self._splits.clear()
