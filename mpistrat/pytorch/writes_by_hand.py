"""Parameters that a program writes itself inside `run`, where several replicas of a rank have one copy of them.

Each replica would do it, so the change would count once for each of them: that is an error, found when a turn ends.
Torch counts the writes to a parameter in its version. It counts a write through `.data` in the tensor that `.data`
gave, not in the parameter. Here the writes through all `.data` of a parameter count together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.pytorch import hooks
from mpistrat.pytorch.modules.registry import ParameterSlot, Registry, version

_memory_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter: its `_ParameterData`


class _ParameterData:
    """What all `.data` of a parameter are, which torch counts as one tensor then."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.tensor = hooks.original_data(parameter)
        self.replaced = 0

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        if not self.tensor.is_set_to(parameter):
            self.tensor = hooks.original_data(parameter)
            self.replaced += 1
        return self.tensor


class WritesByHand:
    """Which parameters replicas have written. Between two meetings each of them has one turn, in order.

    Args:
        modules: gives the strategy's modules.
    """

    def __init__(
        self, registry: Registry, count: int, modules: Callable[[], Iterable[torch.nn.Module]]
    ) -> None:
        torch.nn.Parameter.data = hooks.data_given_by(_data)
        self._registry, self._count, self._modules = registry, count, modules
        self._memories = weakref.WeakValueDictionary[ParameterSlot, _ParameterData]()
        self._seen: dict[ParameterSlot, Any] = {}
        # What the parameters are that replicas have written since the last meeting; None: an optimizer has.
        self._written: dict[ParameterSlot, bytes | None] = {}

    def begin(self) -> None:
        """A run begins."""
        self._written.clear()
        self._look()

    def stepped(self) -> None:
        """An optimizer has written, once for all replicas."""
        self._written.update((slot, None) for slot, _ in self._look())

    def end_turn(self, replica: int) -> None:
        """The turn of this local replica ends. Raises: RuntimeError: it has changed what another has written."""
        for slot, parameter in self._look():
            now = _bits(parameter)
            if replica == 0:
                self._written[slot] = now
            if self._written.setdefault(slot, now) != now and not self._is_renormalized(parameter):
                raise RuntimeError(
                    f"parameter {slot.name}, of shape {list(parameter.shape)}, was written inside run by something "
                    f"else than an optimizer's step: the {self._count} replicas of this rank share it, and the change "
                    "would count once for each. Step with an optimizer of torch.optim; or write it once for all, after "
                    "run or in get_replica_context().merge_call(fn); or start one rank per replica"
                )
        if replica == self._count - 1:
            self._written.clear()

    def _look(self) -> list[tuple[ParameterSlot, torch.Tensor]]:
        """The parameters that were written since the last look."""
        before, self._seen = self._seen, {}
        written = []
        for slot in self._registry.slots:
            parameter = slot.reference()
            if parameter is not None:
                now = self._seen[slot] = self._mark(slot, parameter)
                if before.get(slot, now) != now:
                    written.append((slot, parameter))
        return written

    def _mark(self, slot: ParameterSlot, parameter: torch.Tensor) -> Any:
        """What differs after `parameter` was written."""
        if not isinstance(parameter, torch.nn.Parameter):
            return _bits(parameter)  # whose `.data` is torch's own
        memory = self._memories.get(slot)
        if memory is None:
            if parameter.layout is not torch.strided or type(parameter.data) is not torch.Tensor:
                return version(parameter)
            memory = _memory_of.setdefault(parameter, _ParameterData(parameter))
            self._memories[slot] = memory
        tensor = memory.of(parameter)
        return version(parameter), version(tensor), memory.replaced

    def _is_renormalized(self, parameter: torch.Tensor) -> bool:
        """Whether forwards write it: the rows that they look up, of an embedding with `max_norm`."""
        return any(
            getattr(module, "max_norm", None) is not None
            and any(p is parameter for p in module._parameters.values())
            for root in self._modules()
            for module in root.modules()
        )


def _data(parameter: torch.nn.Parameter) -> torch.Tensor:
    """`parameter.data`."""
    memory: _ParameterData | None = _memory_of.get(parameter)
    return hooks.original_data(parameter) if memory is None else memory.of(parameter).detach()


def _bits(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    return host.view(torch.uint8).numpy().tobytes()
