"""Finds writes of a program to parameters inside `run`, if several replicas of a rank share one copy of them.

Each replica would make the change, so it would be made several times. That is an error. It is found when a replica's
turn (its work between two meetings of the rank's replicas) ends.

Torch counts the writes to a parameter in its `_version`, but a write through `.data` in the version of the `.data`
tensor. So `Parameter.data` is replaced here: all `.data` of a parameter share one version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.pytorch import hooks
from mpistrat.pytorch.modules.registry import ParameterSlot, Registry, version

_memory_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the `_ParameterData` of each parameter


class _ParameterData:
    """The one tensor that all `.data` of a parameter are views of, so that torch counts their writes in its version.

    Attributes:
        tensor: a detached tensor with the parameter's memory.
        replaced: how often the parameter has got other memory.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.tensor = hooks.original_data(parameter)
        self.replaced = 0

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        if not self.tensor.is_set_to(parameter):
            self.tensor = hooks.original_data(parameter)
            self.replaced += 1
        return self.tensor


class WritesByHand:
    """Finds parameters that replicas have written without an optimizer.

    Between two meetings of the rank's replicas each replica has one turn, in order of their numbers.
    Args:
        registry: the mirrored parameters.
        count: number of replicas of this rank.
        modules: returns the strategy's modules.
    """

    def __init__(
        self, registry: Registry, count: int, modules: Callable[[], Iterable[torch.nn.Module]]
    ) -> None:
        data: Any = property(_data, hooks.original_data_setter)
        torch.nn.Parameter.data = data
        self._registry = registry
        self._count = count
        self._modules = modules
        self._memories = weakref.WeakValueDictionary[ParameterSlot, _ParameterData]()
        self._seen: dict[ParameterSlot, Any] = {}
        # For each parameter that was written since the last meeting of the replicas: its bytes after the turn of the
        # first replica that wrote it; None if an optimizer has written it.
        self._written: dict[ParameterSlot, bytes | None] = {}

    def begin(self) -> None:
        """Forget all writes before this run: the program may write then. Called by: the start of each run."""
        self._written.clear()
        self._look()

    def stepped(self) -> None:
        """Note that an optimizer has written parameters, once for all replicas."""
        for slot, _ in self._look():
            self._written[slot] = None

    def end_turn(self, replica: int) -> None:
        """Check the parameters that a replica has written in its turn. Called by: the end of the turn.

        Args: replica: number of the replica among this rank's.
        Raises: RuntimeError if a replica other than 0 has written a parameter after an optimizer, or has left other
            bytes than an earlier replica since the last meeting; not for an embedding with `max_norm`.
        """
        for slot, parameter in self._look():
            now = _bits(parameter)
            if replica == 0:
                self._written[slot] = now
            differs = self._written.setdefault(slot, now) != now
            if differs and not self._is_renormalized(parameter):
                raise RuntimeError(
                    f"parameter {slot.name}, of shape {list(parameter.shape)}, was written inside run by something "
                    f"else than an optimizer's step: the {self._count} replicas of this rank share it, so each would "
                    "change it again. Step with an optimizer of torch.optim, or write the parameter after run or in "
                    "get_replica_context().merge_call(fn), or start one rank per replica"
                )
        if replica == self._count - 1:
            self._written.clear()

    def _look(self) -> list[tuple[ParameterSlot, torch.Tensor]]:
        """Return the slots and parameters that were written, by anything, since the last call of `_look`."""
        before = self._seen
        self._seen = {}
        written = []
        for slot in self._registry.slots:
            parameter = slot.reference()
            if parameter is not None:
                now = self._seen[slot] = self._mark(slot, parameter)
                if before.get(slot, now) != now:
                    written.append((slot, parameter))
        return written

    def _mark(self, slot: ParameterSlot, parameter: torch.Tensor) -> Any:
        """Return a value that changes with each write to `parameter`: its versions, or its bytes."""
        if not isinstance(parameter, torch.nn.Parameter):
            return _bits(parameter)  # only `Parameter.data` is replaced
        memory = self._memories.get(slot)
        if memory is None:
            if parameter.layout is not torch.strided or type(parameter.data) is not torch.Tensor:
                return version(parameter)
            memory = _memory_of.setdefault(parameter, _ParameterData(parameter))
            self._memories[slot] = memory
        tensor = memory.of(parameter)
        return version(parameter), version(tensor), memory.replaced

    def _is_renormalized(self, parameter: torch.Tensor) -> bool:
        """Whether forwards write `parameter`: an embedding with `max_norm` rescales the rows that it looks up."""
        for root in self._modules():
            for module in root.modules():
                renormalizes = getattr(module, "max_norm", None) is not None
                # A set finds a tensor by its identity.
                if renormalizes and parameter in set(module._parameters.values()):
                    return True
        return False


def _data(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return `parameter.data`: the getter that replaces torch's."""
    memory: _ParameterData | None = _memory_of.get(parameter)
    return hooks.original_data(parameter) if memory is None else memory.of(parameter).detach()


def _bits(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    return host.view(torch.uint8).numpy().tobytes()
