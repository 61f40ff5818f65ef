"""The parameters and buffers that a strategy mirrors, in an order that is the same on all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat import arrays


@dataclasses.dataclass(eq=False)
class ParameterSlot:
    """One mirrored parameter. A strategy keeps its data about the parameter by this object.

    Attributes:
        name: the parameter's path, for messages.
        reference: a weak reference to the parameter; it gives None once the program has dropped it.
    """

    name: str
    reference: weakref.ref[torch.Tensor]

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor that each replica has of its own, the parameter's `.grad`.

        None if there is no gradient, or if the program has dropped the parameter.
        """
        return getattr(self.reference(), "grad", None)

    def put(self, gradient: torch.Tensor | None) -> None:
        """Set the parameter's `.grad` to `gradient`; do nothing if the program has dropped the parameter."""
        parameter = self.reference()
        if parameter is not None:
            parameter.grad = gradient


@dataclasses.dataclass(eq=False)
class BufferSlot:
    """One mirrored buffer, found by its module and its name there, because a forward may replace the tensor.

    Attributes:
        name: the buffer's path, for messages.
        module: a weak reference to the module that has the buffer.
        key: the buffer's name in the module.
        rule: how the replicas' copies become one, from `buffer_rules.rule_of`; "" if it is not known.
        base: the value that a sum had before the replicas' writes; None for other rules.
        in_step: whether a step has begun since the copies were last equal.
        differs: whether this rank's copy has differed from the result; always False for a buffer with a rule.
    """

    name: str
    module: weakref.ref[torch.nn.Module]
    key: str
    rule: str
    base: Any = None
    in_step: bool = False
    differs: bool = False
    # The id and version of the tensor of each replica of this rank, when they were last equal.
    settled: frozenset[tuple[int, int]] = frozenset()

    def tensor(self) -> torch.Tensor | None:
        """Return the module's buffer; None if the program has dropped it, or if it is a DTensor."""
        module = self.module()
        tensor = None if module is None else module._buffers.get(self.key)
        return None if arrays.is_sharded(tensor) else tensor

    def put(self, tensor: torch.Tensor | None) -> None:
        """Make `tensor` the module's buffer. None changes nothing."""
        module = self.module()
        if module is not None and tensor is not None:
            module._buffers[self.key] = tensor

    def changed(self, tensor: torch.Tensor | None) -> bool:
        """Whether a replica's `tensor` is written, or another object, since the last `settle`; False for None."""
        if tensor is None:
            return False
        return (id(tensor), version(tensor)) not in self.settled

    def settle(self, copies: Iterable[torch.Tensor | None]) -> None:
        """Record that the replicas' tensors are equal now. Args: copies: a tensor per replica of this rank, or None."""
        versions = [(id(copy), version(copy)) for copy in copies]
        self.settled = frozenset(versions)
        if self.rule == "sum" and (tensor := self.tensor()) is not None:
            self.base = tensor.detach().clone()

    def declare(self, rule: str) -> None:
        """Let the copies become one by `rule` from now on, and a sum begin with the present value."""
        self.rule = rule
        self.differs = False
        self.settle([self.tensor()])

    def begin_step(self) -> None:
        """Note that a step begins. After the copies were made equal, only the program itself has written the buffer.

        So a sum goes on from the present value, as the program may have loaded it, or set it back to 0.
        """
        if self.rule == "sum" and not self.in_step:
            self.settle([self.tensor()])
        self.in_step = True


Slot = ParameterSlot | BufferSlot


def version(tensor: torch.Tensor | None) -> int:
    """Return how often `tensor` has been written in place, as torch counts; 0 for an inference tensor and for None."""
    if tensor is None or tensor.is_inference():
        return 0
    return tensor._version


class NewTensors(NamedTuple):
    """Tensors that are mirrored together.

    Attributes:
        parameters: tuples (path, parameter).
        buffers: tuples (path, module, name in the module, buffer).
    """

    parameters: list[tuple[str, torch.Tensor]]
    buffers: list[tuple[str, torch.nn.Module, str, torch.Tensor]]


def tensors_in(root: torch.nn.Module) -> NewTensors:
    """Return all parameters and buffers in `root` and its submodules, except DTensors. Shared parameters come once.

    The paths begin with the class name of `root`.
    """
    kind = type(root).__name__
    parameters: list[tuple[str, torch.Tensor]] = [
        (f"{kind}.{name}", parameter)
        for name, parameter in root.named_parameters()
        if not arrays.is_sharded(parameter)
    ]
    buffers = [
        (f"{path}.{key}", module, key, buffer)
        for path, module in root.named_modules(prefix=kind)
        for key, buffer in module._buffers.items()
        if buffer is not None and not arrays.is_sharded(buffer)
    ]
    return NewTensors(parameters, buffers)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether the tensor can have a gradient and a mean: floats and complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


all_registries: weakref.WeakSet[Registry] = weakref.WeakSet()  # of all strategies


class Registry:
    """The slots of a strategy's mirrored parameters and buffers. It does not keep a dropped model alive.

    Attributes:
        slots: the parameters, in the same order on all ranks. Other code calls a position in it the parameter's slot.
        buffers: the buffers, in the same order on all ranks.
    """

    def __init__(self) -> None:
        self.slots: list[ParameterSlot] = []
        self.buffers: list[BufferSlot] = []
        self._slot_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._buffers_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by module, then by name
        all_registries.add(self)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._slot_of

    def parameters(self) -> list[torch.Tensor | None]:
        """Return all parameters by slot; None for a parameter that the program has dropped."""
        return [slot.reference() for slot in self.slots]

    def own_tensors(self) -> list[tuple[Slot, torch.Tensor | None]]:
        """Return pairs of a slot and its tensor: the `.grad` of each parameter, then each buffer.

        The tensors belong to the replica that runs now. None stands for no gradient and for a dropped buffer.
        """
        slots: list[Slot] = [*self.slots, *self.buffers]
        return [(slot, slot.tensor()) for slot in slots]

    def new_in(self, root: torch.nn.Module) -> NewTensors:
        """Return the tensors in `root` that are not registered yet."""
        parameters, buffers = tensors_in(root)
        return NewTensors(
            [(name, parameter) for name, parameter in parameters if parameter not in self],
            [buffer for buffer in buffers if self.buffer(*buffer[1:3]) is None],
        )

    def add_parameter(self, name: str, parameter: torch.Tensor) -> None:
        slot = ParameterSlot(name, weakref.ref(parameter))
        self._slot_of[parameter] = slot
        self.slots.append(slot)

    def buffer(self, module: torch.nn.Module, key: str) -> BufferSlot | None:
        """Return the slot of the buffer `key` of `module`; None if it is not mirrored."""
        return self._buffers_of.get(module, {}).get(key)

    def add_buffer(self, name: str, module: torch.nn.Module, key: str, rule: str) -> BufferSlot:
        slot = BufferSlot(name, weakref.ref(module), key, rule)
        self._buffers_of.setdefault(module, {})[key] = slot
        self.buffers.append(slot)
        return slot

    def begin_step(self) -> None:
        """Note that a step begins: a `run`, or a step of a distributed dataset inside `Strategy.replica()`."""
        for slot in self.buffers:
            slot.begin_step()

    def clear(self) -> None:
        """Forget all parameters and buffers."""
        self.slots.clear()
        self.buffers.clear()
        self._slot_of.clear()
        self._buffers_of.clear()

    def alive(self) -> list[bool]:
        """Return a boolean for each parameter, then for each buffer: whether the program still has it on this rank."""
        return [
            *(slot.reference() is not None for slot in self.slots),
            *(slot.module() is not None for slot in self.buffers),
        ]

    def keep(self, alive_somewhere: Sequence[bool]) -> None:
        """Forget the parameters and buffers that the program has dropped on every rank. Slot numbers change.

        Args: alive_somewhere: whether any rank still has each parameter, then each buffer: the MAX of `alive`.
        """
        buffers_alive = alive_somewhere[len(self.slots) :]
        self.slots = list(itertools.compress(self.slots, alive_somewhere))
        self.buffers = list(itertools.compress(self.buffers, buffers_alive))
