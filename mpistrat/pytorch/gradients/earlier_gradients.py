"""The gradients that are in `.grad` before a backward.

Reduced gradients are set aside. Gradients of backwards inside `no_sync()` are not reduced yet ("local"), and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpistrat.pytorch.modules.registry import ParameterSlot, Registry


class _Split(NamedTuple):
    """A `.grad` tensor, `combined`, that is the sum of a reduced and a local gradient, and its version then."""

    combined: torch.Tensor
    version: int
    reduced: torch.Tensor
    local: torch.Tensor


class EarlierGradients:
    """The gradients of one replica before a backward, reduced and local ones."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._local: set[ParameterSlot] = set()
        self._splits: dict[ParameterSlot, _Split] = {}

    def set_aside(self, parameters: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Move the reduced gradients out of `.grad`, and return them by position in `parameters`. Local gradients stay.

        Raises: RuntimeError if the program has changed a `.grad` that is the sum of a reduced and a local gradient.
        """
        earlier = {}
        for i, (slot, parameter) in enumerate(zip(self._registry.slots, parameters, strict=True)):
            gradient = None if parameter is None else parameter.grad
            if slot not in self._local:
                if gradient is not None:
                    earlier[i], parameter.grad = gradient, None
                continue
            split = self._splits.pop(slot, None)
            if gradient is None:
                self._local.discard(slot)
            elif split is None:
                continue
            elif gradient is split.combined and gradient._version == split.version:
                earlier[i], parameter.grad = split.reduced, split.local
            elif gradient.to_dense().any():
                raise RuntimeError(
                    f"the .grad of {slot.name} mixes reduced and no_sync() gradients, and was changed "
                    "before the next backward(); call zero_grad() before accumulating with no_sync()"
                )
        return earlier

    def put_back(
        self,
        parameters: Sequence[Any],
        earlier: dict[int, torch.Tensor],
        reduced: dict[int, torch.Tensor] | None,
    ) -> None:
        """Add the new gradients to the earlier ones, and put the sums into `.grad`.

        Args:
            earlier: the result of `set_aside`; emptied of the slots in `reduced`.
            reduced: this backward's reduced gradients by slot; None inside `no_sync()`: `.grad` becomes local.
        """
        if reduced is None:
            self._keep(parameters, earlier)
            return
        self._local.clear()
        self._splits.clear()
        totals, addends = [], []
        for number, added in reduced.items():
            before, parameter = earlier.pop(number, None), parameters[number]
            if parameter is None:
                continue
            if before is None:
                parameter.grad = added
            elif before.is_sparse or added.is_sparse:
                parameter.grad = before + added
            else:
                parameter.grad = before
                totals.append(before)
                addends.append(added)
        if totals:
            torch._foreach_add_(totals, addends)
        for slot, before in earlier.items():  # no replica has used these parameters
            parameters[slot].grad = before

    def _keep(self, parameters: Sequence[Any], earlier: dict[int, torch.Tensor]) -> None:
        for i, (slot, parameter) in enumerate(zip(self._registry.slots, parameters, strict=True)):
            local, reduced = None if parameter is None else parameter.grad, earlier.get(i)
            if local is not None:
                self._local.add(slot)
                if reduced is not None:
                    parameter.grad = combined = reduced + local
                    self._splits[slot] = _Split(combined, combined._version, reduced, local)
            elif parameter is not None:
                parameter.grad = reduced

    def undo(self, parameters: Sequence[Any], earlier: dict[int, torch.Tensor]) -> None:
        """Restore the earlier gradients after a failed backward.

        The gradient of a parameter without a local one is dropped: only the failed backward can have added it.
        """
        for slot, parameter in zip(self._registry.slots, parameters, strict=True):
            if parameter is not None and slot not in self._local:
                parameter.grad = None
        self._keep(parameters, earlier)
