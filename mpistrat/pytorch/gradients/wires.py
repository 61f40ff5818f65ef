"""What the wire format has held back of each buffer of gradients."""

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

# Of parameters that take turns, such as a generator's and a discriminator's, each turn keeps its residuals: in all so
# many times what the largest backward has.
_TURNS = 4


class Wire:
    """A format and what it has held back of one buffer; called by communicators where messages go."""

    def __init__(self, wire_format: WireFormat) -> None:
        self._format = wire_format
        self.residual = torch.zeros(0, device="cpu")

    @property
    def size(self) -> int:
        """Values held back."""
        return len(self.residual)

    def __call__(self, communicator: Communicator, values: Any) -> None:
        """`values`: a NumPy array or tensor, float32, of this rank."""
        tensor = arrays.as_tensor(values)
        if len(self.residual) != len(tensor):
            if self.size:
                warnings.warn(
                    f"gradients go by another way than they did before the restart: the {self.size} values that rank "
                    f"{communicator.rank} has held back of a buffer are lost",
                    UserWarning,
                    stacklevel=2,
                )
            self.residual = torch.zeros_like(tensor)
        self._format.combine(communicator, tensor, self.residual)


class Wires:
    """Those of a strategy's buffers of gradients.

    Args:
        wire_format: None leaves everything as it is.
        registry: of the parameters, whose slots change their numbers when others are dropped.

    Attributes: has_format: whether gradients are sent otherwise than they are.
    """

    def __init__(self, wire_format: WireFormat | None, registry: Registry) -> None:
        self._format, self._registry = wire_format, registry
        self.has_format = wire_format is not None
        self._wires: dict[tuple[ParameterSlot, ...], Wire] = {}  # the least recently used first
        self._used: set[tuple[ParameterSlot, ...]] = set()  # in this backward
        self._most = 0

    def of(self, slots: Sequence[int]) -> Wire | None:
        """That of the buffer of the gradients of `slots`, whose residual it keeps."""
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
        """The sum, times `scale`, of a buffer of the gradients of `slots`.

        Args: natively: by an accelerator's own collectives, in which short floats are added as such.
        """
        label = f"{label}{self}"
        if natively and isinstance(self._format, ShortFloats):
            return Reduction("sum", label, scale, summed_in=self._format.dtype)
        return reducing("sum", label, scale).compressed_by(self.of(slots))

    def wait_for_host(self, natively: bool) -> bool:
        """Whether the host takes part in sums of buffers on an accelerator. Args: natively: as of `reduction`."""
        return not natively or not isinstance(self._format, ShortFloats | None)

    def end_backward(self) -> None:
        """Forget the buffers that were not used for longest, where there are too many."""
        self._most = max(self._most, sum(self._wires[key].size for key in self._used))
        self._used.clear()
        # One that no message was given to holds nothing back: another may take its place.
        self._wires = {key: wire for key, wire in self._wires.items() if wire.size}
        total = sum(wire.size for wire in self._wires.values())
        while total > _TURNS * self._most:
            key = next(iter(self._wires))
            total -= self._wires.pop(key).size

    def state(self) -> dict[str, Any]:
        """What this rank holds back, for `load`; tensors are shared. Between backwards."""
        index = {slot: i for i, slot in enumerate(self._registry.slots)}
        held = [
            {"slots": [index[slot] for slot in key], "residual": wire.residual}
            for key, wire in self._wires.items()
            if all(slot in index for slot in key)
        ]
        return {"held_back": held, "most": self._most}

    def load(self, states: Sequence[Mapping[str, Any]], whole: bool) -> None:
        """Hold back the sum of what ranks held back, of parameters with the same slots.

        Args:
            states: any number.
            whole: take only what is of whole buffers, and warn of slices.
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
                    "what ranks have held back of gradients is lost: their number has changed, and each carries a "
                    "slice",
                    UserWarning,
                    stacklevel=2,
                )
                self._wires = {}
                return
            wire = self._wires.setdefault(key, Wire(self._format))
            residual = held["residual"]
            wire.residual = wire.residual + residual if wire.size else residual.clone()

    def explain(self) -> str:
        """For people; empty without a format."""
        if self._format is None:
            return ""
        crossed = f"up to {self._most:,} values of a backward()" if self._most else "none has yet"
        return f"gradients cross the network as {name_of(self._format)}: {crossed}"

    def __str__(self) -> str:
        return "" if self._format is None else f", as {name_of(self._format)}"
