"""The parameters and buffers that are mirrored, in an order that is the same on all ranks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary


@dataclasses.dataclass(eq=False)
class BufferSlot:
    """One buffer: found again by its module and name, since a forward may replace the tensor."""

    name: str
    module: weakref.ref[torch.nn.Module]
    key: str
    # Identity and version of the tensors, one per replica of this rank, when they were last equal.
    settled: frozenset[tuple[int, int]] = frozenset()

    def tensor(self) -> torch.Tensor | None:
        module = self.module()
        return None if module is None else module._buffers.get(self.key)

    def written(self) -> bool:
        """Whether the buffer of the replica that runs here has changed since `settle`."""
        tensor = self.tensor()
        return tensor is not None and (id(tensor), _version(tensor)) not in self.settled

    def settle(self, copies: Iterable[torch.Tensor | None]) -> None:
        """Remember that `copies`, one per replica of this rank, are equal on all replicas now."""
        self.settled = frozenset((id(c), _version(c)) for c in copies if c is not None)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Registry:
    """Weak references only: a model that the program drops is freed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.buffers: list[BufferSlot] = []
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._slot_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._known_buffers: set[tuple[int, str]] = set()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._slot_of

    def __len__(self) -> int:
        return len(self._parameters)

    def parameters(self) -> list[torch.Tensor | None]:
        """All parameters by slot; None where the program has dropped one."""
        return [reference() for reference in self._parameters]

    def add_parameter(self, name: str, parameter: torch.Tensor) -> None:
        self._slot_of[parameter] = len(self._parameters)
        self._parameters.append(weakref.ref(parameter))
        self.names.append(name)

    def knows_buffer(self, module: torch.nn.Module, key: str) -> bool:
        return (id(module), key) in self._known_buffers and any(
            slot.module() is module and slot.key == key for slot in self.buffers
        )

    def add_buffer(self, name: str, module: torch.nn.Module, key: str) -> BufferSlot:
        slot = BufferSlot(name, weakref.ref(module), key)
        self._known_buffers.add((id(module), key))
        self.buffers.append(slot)
        return slot

    def drop_dead(self, alive_somewhere: list[bool]) -> None:
        """Forget the parameters that are False in `alive_somewhere`, which all ranks must agree on."""
        kept = [i for i, alive in enumerate(alive_somewhere) if alive]
        self.names = [self.names[i] for i in kept]
        self._parameters = [self._parameters[i] for i in kept]
        for slot, reference in enumerate(self._parameters):
            parameter = reference()
            if parameter is not None:
                self._slot_of[parameter] = slot
