"""What the wire format has held back of each buffer of gradients."""

from __future__ import annotations

from typing import Any

import torch

from mpistrat.communicators import Communicator
from mpistrat.wire_formats import WireFormat

# Of parameters that take turns, such as a generator's and a discriminator's, each turn keeps its residuals.
_BACKWARDS_KEPT = 8


class Wire:
    """A format and what it has held back of one buffer; called by communicators where messages go."""

    def __init__(self, wire_format: WireFormat) -> None:
        self._format = wire_format
        self._residual = torch.zeros(0)

    def __call__(self, communicator: Communicator, values: Any) -> None:
        """`values`: a NumPy array or tensor, float32, of this rank."""
        tensor = torch.as_tensor(values)
        if len(self._residual) != len(tensor):
            self._residual = torch.zeros_like(tensor)
        self._format.combine(communicator, tensor, self._residual)


class Wires:
    """Those of a strategy's buffers of gradients.

    Args:
        wire_format: None leaves everything as it is.
    """

    def __init__(self, wire_format: WireFormat | None) -> None:
        self._format = wire_format
        self._wires: dict[
            tuple[int, ...], tuple[Wire, int]
        ] = {}  # and the backward that used it last
        self._backwards = 0

    def of(self, slots: list[int]) -> Wire | None:
        """That of the buffer of the gradients of `slots`, whose residual it keeps."""
        if self._format is None:
            return None
        key = tuple(slots)
        wire = self._wires[key][0] if key in self._wires else Wire(self._format)
        self._wires[key] = wire, self._backwards
        return wire

    def end_backward(self) -> None:
        """Forget the buffers that no recent backward has had: those of parameters that are used no more."""
        self._backwards += 1
        oldest = self._backwards - _BACKWARDS_KEPT
        self._wires = {key: kept for key, kept in self._wires.items() if kept[1] >= oldest}

    def __str__(self) -> str:
        return "" if self._format is None else f", as {self._format}"
