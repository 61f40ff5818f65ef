"""The gradients that are in `.grad` before a backward.

Gradients that are already reduced are moved out of `.grad` during the backward. Gradients of backwards inside
`no_sync()` are not reduced yet ("local"). They stay in `.grad`, so that they are reduced with the new gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpistrat.pytorch.modules.registry import ParameterSlot, Registry


class _Split(NamedTuple):
    """The two parts of a `.grad` tensor that is the sum of a reduced and a local (not reduced) gradient.

    Attributes:
        combined: the `.grad` tensor, `reduced + local`.
        version: `_version` of `combined` when it was made. Another version shows that the program has changed it.
    """

    combined: torch.Tensor
    version: int
    reduced: torch.Tensor
    local: torch.Tensor


class EarlierGradients:
    """Tells the local gradients of one replica (from `no_sync()`, not reduced yet) from its reduced gradients."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._local: set[ParameterSlot] = set()
        self._splits: dict[ParameterSlot, _Split] = {}

    @property
    def has_local(self) -> bool:
        """Whether some `.grad` has the gradient of a backward inside `no_sync()`, which is not reduced."""
        return any(slot.tensor() is not None for slot in self._local)

    def set_aside(self, parameters: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Move the reduced gradients out of `.grad` before a backward. Local gradients stay in `.grad`.

        Args: parameters: the parameters in the order of the registry's `slots`; None for a dropped parameter.
        Returns: the reduced gradients, by index in `parameters`. The `.grad` of these parameters is now None, or the
            local gradient.
        Raises: RuntimeError if a `.grad` was the sum of a reduced and a local gradient, and the program has changed it
            to anything but None or zeros.
        """
        earlier = {}
        for i, (slot, parameter) in enumerate(zip(self._registry.slots, parameters, strict=True)):
            gradient = None if parameter is None else parameter.grad
            if slot not in self._local:
                if gradient is not None:
                    earlier[i] = gradient
                    parameter.grad = None
                continue
            split = self._splits.pop(slot, None)
            if gradient is None:
                self._local.discard(slot)
            elif split is None:
                continue
            elif gradient is split.combined and gradient._version == split.version:
                earlier[i] = split.reduced
                parameter.grad = split.local
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
        """Set `.grad` after a backward: this backward's reduced gradients plus the earlier reduced gradients.

        Args:
            parameters: the parameters by slot; None for a dropped parameter.
            earlier: the result of `set_aside`. Entries that are also in `reduced` are removed from it.
            reduced: this backward's reduced gradients by slot. None inside `no_sync()`: the new gradients in `.grad`
                are local then, and the earlier gradients are added to them.
        """
        if reduced is None:
            self._keep(parameters, earlier)
            return
        self._local.clear()
        self._splits.clear()
        totals = []
        addends = []
        for number, added in reduced.items():
            before = earlier.pop(number, None)
            parameter = parameters[number]
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
            if parameter is None:
                continue
            local = parameter.grad
            reduced = earlier.get(i)
            if local is None:
                parameter.grad = reduced
                continue
            self._local.add(slot)
            if reduced is not None:
                combined = reduced + local
                parameter.grad = combined
                self._splits[slot] = _Split(combined, combined._version, reduced, local)

    def undo(self, parameters: Sequence[Any], earlier: dict[int, torch.Tensor]) -> None:
        """Put the gradients `earlier` back into `.grad` after a failed backward.

        A parameter without a local gradient before loses the gradient in `.grad`, because the failed backward has added
        it. Where a local gradient was there, the failed backward's contribution stays in it.
        """
        for slot, parameter in zip(self._registry.slots, parameters, strict=True):
            if parameter is not None and slot not in self._local:
                parameter.grad = None
        self._keep(parameters, earlier)
