"""The residuals of a wire format: the values of each buffer of gradients that it has not sent yet.

A wire format makes messages between nodes shorter than float32, and adds the rounding error to the next message.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpistrat import arrays
from mpistrat.communicators import Communicator, Reduction, reducing
from mpistrat.pytorch.modules.registry import ParameterSlot, Registry
from mpistrat.wire_formats import ShortFloats, WireFormat, name_of

# Backwards may alternate between models, such as a generator and a discriminator, and each model keeps its residuals.
# All residuals together have at most this many times the values of the backward with the most values.
_TURNS = 4


class Wire:
    """A wire format, with the residual (the values not sent yet) of one buffer of gradients.

    A communicator calls the object as a function where messages cross the network.
    Attributes: residual: float32, on the host before the first call; empty if nothing was ever sent.
    """

    def __init__(self, wire_format: WireFormat) -> None:
        self._format = wire_format
        self.residual = torch.zeros(0, device="cpu")

    @property
    def size(self) -> int:
        """Number of values in the residual."""
        return len(self.residual)

    def __call__(self, communicator: Communicator, values: Any) -> None:
        """Add up `values` over the ranks of `communicator` in place, and keep the new residual.

        If a restored residual has another length than `values`, it is replaced by zeros, with a warning on this rank.
        Args: values: this rank's float32 array or tensor, 1-D.
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
    """The wires of all buffers of a strategy's gradients. A wire is the wire format and residual of one buffer.

    Args:
        wire_format: the format of gradients in messages between nodes; None sends them as they are.
        registry: the mirrored parameters. Wires are found by `ParameterSlot` objects, because slot numbers change.

    Attributes: has_format: whether there is a wire format.
    """

    def __init__(self, wire_format: WireFormat | None, registry: Registry) -> None:
        self._format = wire_format
        self._registry = registry
        self.has_format = wire_format is not None
        self._wires: dict[tuple[ParameterSlot, ...], Wire] = {}  # the least recently used first
        self._used: set[tuple[ParameterSlot, ...]] = set()  # in this backward
        self._most = 0

    def of(self, slots: Sequence[int]) -> Wire | None:
        """Return the wire of the buffer with the gradients of `slots`, made at first use; None without a format."""
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
        """Return the reduction for a buffer of gradients: the sum over ranks, times `scale`, in the wire format.

        Args:
            label: words for the buffer in messages; the wire format's name is added.
            scale: number that multiplies the sum; None for a plain sum.
            slots: the numbers of the parameters with gradients in the buffer.
            natively: whether an accelerator's own collectives (NCCL) sum it up. They add float16 and bfloat16 directly,
                without a residual.
        """
        label = f"{label}{self}"
        if natively and isinstance(self._format, ShortFloats):
            return Reduction("sum", label, scale, summed_in=self._format.dtype)
        return reducing("sum", label, scale).compressed_by(self.of(slots))

    def wait_for_host(self, natively: bool) -> bool:
        """Whether the host must wait for the sums of buffers that are on an accelerator.

        Args: natively: whether an accelerator's own collectives (NCCL) can sum up buffers.
        Returns: False only with such collectives, and with short floats or without a wire format.
        """
        return not natively or not isinstance(self._format, ShortFloats | None)

    def end_backward(self) -> None:
        """Forget the residuals of the least recently used buffers if all residuals hold too many values.

        The limit is four times the values of the backward with the most values. Called by: the end of each reduction.
        """
        values = sum(self._wires[key].size for key in self._used)
        self._most = max(self._most, values)
        self._used.clear()
        # A wire that was never called has no residual, so it is not kept.
        self._wires = {key: wire for key, wire in self._wires.items() if wire.size}
        total = sum(wire.size for wire in self._wires.values())
        while total > _TURNS * self._most:
            key = next(iter(self._wires))
            total -= self._wires.pop(key).size

    def state(self) -> dict[str, Any]:
        """Return this rank's residuals (not copied), with the slots of each buffer, for `load`.

        Buffers with a parameter that is no longer mirrored are left out.
        Called by: a checkpoint, between backwards.
        """
        index = {slot: i for i, slot in enumerate(self._registry.slots)}
        held = [
            {"slots": [index[slot] for slot in key], "residual": wire.residual}
            for key, wire in self._wires.items()
            if all(slot in index for slot in key)
        ]
        return {"held_back": held, "most": self._most}

    def load(self, states: Sequence[Mapping[str, Any]], whole: bool) -> None:
        """Replace all residuals by saved ones. Residuals of the same buffer from several ranks are added up.

        Does nothing without a wire format.
        Args:
            states: results of `state` of any number of ranks; none drop all residuals.
            whole: whether the number of ranks has changed, so that only residuals of whole buffers can be used. If a
                saved residual is of a slice of a buffer, this warns and drops all residuals.
        """
        if self._format is None:  # this program sends gradients as they are
            return
        self._used.clear()
        self._wires = {}
        self._most = max((state["most"] for state in states), default=0)
        for state in states:
            for held in state["held_back"]:
                residual = held["residual"]
                key = tuple(self._registry.slots[slot] for slot in held["slots"])
                parameters = [slot.reference() for slot in key]
                length = sum(p.numel() for p in parameters if p is not None)
                if whole and len(residual) != length:
                    warnings.warn(
                        "the values that the wire format held back of gradients are lost: the number of ranks has "
                        "changed, and each rank had held back values of a slice",
                        UserWarning,
                        stacklevel=2,
                    )
                    self._wires = {}
                    return
                wire = self._wires.setdefault(key, Wire(self._format))
                wire.residual = wire.residual + residual if wire.size else residual.clone()

    def explain(self) -> str:
        """Return a line for people about the wire format, with its most values in a backward; "" without a format."""
        if self._format is None:
            return ""
        crossed = f"up to {self._most:,} values of a backward()" if self._most else "none has yet"
        return f"gradients cross the network as {name_of(self._format)}: {crossed}"

    def __str__(self) -> str:
        return "" if self._format is None else f", as {name_of(self._format)}"
