"""The residuals of the wire format: the values that it holds back of each buffer of gradients."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.communicators import Communicator, Reduction, reducing
from mpistrat.pytorch.modules.registry import ParameterSlot, Registry
from mpistrat.wire_formats import ShortFloats, WireFormat, name_of

# Parameters may take turns, as a generator's and a discriminator's, and each turn keeps its residuals. All residuals
# together have at most this many times the largest backward's values.
_TURNS = 4


class Wire:
    """A wire format and the residual of one buffer. Communicators call it where messages cross the network."""

    def __init__(self, wire_format: WireFormat) -> None:
        self._format = wire_format
        self.residual = torch.zeros(0, device="cpu")

    @property
    def size(self) -> int:
        """Number of values in the residual."""
        return len(self.residual)

    def __call__(self, communicator: Communicator, values: Any) -> None:
        """Combine `values`, this rank's float32 array or tensor, over the ranks in place.

        Warns that the residual is lost if its length differs: gradients go another way than before a restart.
        """
        tensor = arrays.as_tensor(values)
        if len(self.residual) != len(tensor):
            if self.size:
                warnings.warn(
                    f"the {self.size} values that rank {communicator.rank} held back of gradients are lost: "
                    "gradients go another way than before the restart",
                    UserWarning,
                    stacklevel=2,
                )
            self.residual = torch.zeros_like(tensor)
        self._format.combine(communicator, tensor, self.residual)


class Wires:
    """The wires of all buffers of a strategy's gradients.

    Args:
        wire_format: None leaves gradients as they are.
        registry: its `ParameterSlot`s are the keys, since slot numbers change.

    Attributes: has_format: whether there is a wire format.
    """

    def __init__(self, wire_format: WireFormat | None, registry: Registry) -> None:
        self._format, self._registry = wire_format, registry
        self.has_format = wire_format is not None
        self._wires: dict[tuple[ParameterSlot, ...], Wire] = {}  # the least recently used first
        self._used: set[tuple[ParameterSlot, ...]] = set()  # in this backward
        self._most = 0

    def of(self, slots: Sequence[int]) -> Wire | None:
        """Return the wire of the buffer with the gradients of `slots`; None without a format."""
        if self._format is None:
            return None
        key = tuple(self._registry.slots[slot] for slot in slots)
        wire = self._wires.pop(key, None) or Wire(self._format)
        self._wires[key] = wire
        self._used.add(key)
        return wire

    def reduction(
        self, label: str, scale: float | None, slots: Sequence[int], *, natively: bool = False
    ) -> Reduction:
        """Return the reduction of a buffer with the gradients of `slots`: the sum, times `scale`.

        Args: natively: whether an accelerator's own collectives sum it up. These add short floats as such.
        """
        label = f"{label}{self}"
        if natively and isinstance(self._format, ShortFloats):
            return Reduction("sum", label, scale, summed_in=self._format.dtype)
        return reducing("sum", label, scale).compressed_by(self.of(slots))

    def wait_for_host(self, natively: bool) -> bool:
        """Whether the host takes part in sums of buffers on an accelerator.

        Args: natively: whether an accelerator's own collectives could sum them up.
        """
        return not natively or not isinstance(self._format, ShortFloats | None)

    def end_backward(self) -> None:
        """Forget the least recently used buffers if their residuals hold too many values."""
        self._most = max(self._most, sum(self._wires[key].size for key in self._used))
        self._used.clear()
        # A wire without a message holds nothing back, so its buffer need not be kept.
        self._wires = {key: wire for key, wire in self._wires.items() if wire.size}
        total = sum(wire.size for wire in self._wires.values())
        while total > _TURNS * self._most:
            key = next(iter(self._wires))
            total -= self._wires.pop(key).size

    def state(self) -> dict[str, Any]:
        """Return this rank's residuals for `load`, not copied. Called by: a checkpoint, between backwards."""
        index = {slot: i for i, slot in enumerate(self._registry.slots)}
        held = [
            {"slots": [index[slot] for slot in key], "residual": wire.residual}
            for key, wire in self._wires.items()
            if all(slot in index for slot in key)
        ]
        return {"held_back": held, "most": self._most}

    def load(self, states: Sequence[Mapping[str, Any]], whole: bool) -> None:
        """Replace the residuals by sums of saved ones, of buffers of parameters with the same slots.

        Args:
            states: results of `state` of any number of ranks.
            whole: take only residuals of whole buffers; warn and drop all if a rank carried a slice.
        """
        if self._format is None:  # this program sends gradients as they are
            return
        self._used.clear()
        self._wires, self._most = {}, max((state["most"] for state in states), default=0)
        for held in itertools.chain.from_iterable(state["held_back"] for state in states):
            key = tuple(self._registry.slots[slot] for slot in held["slots"])
            length = sum(p.numel() for slot in key if (p := slot.reference()) is not None)
            if whole and len(held["residual"]) != length:
                warnings.warn(
                    "the values that the wire format held back of gradients are lost: the number of ranks has changed, "
                    "and each rank had held back values of a slice",
                    UserWarning,
                    stacklevel=2,
                )
                self._wires = {}
                return
            wire = self._wires.setdefault(key, Wire(self._format))
            residual = held["residual"]
            wire.residual = wire.residual + residual if wire.size else residual.clone()

    def explain(self) -> str:
        """Return a line for people about the wire format; empty without one."""
        if self._format is None:
            return ""
        crossed = f"up to {self._most:,} values of a backward()" if self._most else "none has yet"
        return f"gradients cross the network as {name_of(self._format)}: {crossed}"

    def __str__(self) -> str:
        return "" if self._format is None else f", as {name_of(self._format)}"
