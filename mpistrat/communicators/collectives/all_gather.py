"""`AllGather`: every rank gets copies of all ranks' buffers. Their shapes may differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.host_views import as_buffer_of, view_of
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.node.small_calls import TOO_LARGE, SizedCall


@dataclass(slots=True)
class AllGather(Collective):
    """Return copies of all ranks' buffers: see `Communicator.all_gather`.

    Attributes:
        label: words that must be equal on all ranks.
        shapes: an integer array with the shape of each rank's buffer in a row; (1,) for a scalar. None: the ranks have
            not exchanged their shapes yet.
    """

    name: ClassVar[str] = "all_gather"
    sizes_differ: ClassVar[bool] = True
    buffer: Array
    label: str = ""
    shapes: np.ndarray | None = None

    def key(self) -> tuple[Any, ...]:
        return AllGather, self.label, self.buffer.dtype, self.buffer.shape

    def equal_shape(self) -> str:
        return f"{self.buffer.ndim} dimensions"

    def small_form(self, slots: SharedSlots) -> SizedCall:
        return SmallAllGather(slots, self)

    def alone(self) -> list[Array]:
        return [self.buffer]


class SmallAllGather(SizedCall):
    """Each rank writes the shape of its buffer before the buffer's bytes."""

    def __init__(self, slots: SharedSlots, collective: AllGather) -> None:
        buffer = collective.buffer
        super().__init__(slots, buffer, tuple(buffer.shape))
        self._dtype = view_of(buffer).dtype

    def take(self, odd: int, collective: AllGather, payload: np.ndarray) -> list[Array] | object:
        shapes = [place.tolist() for place in self.numbers[odd]]
        lengths = [math.prod(shape) * self._dtype.itemsize for shape in shapes]
        if max(lengths) > LARGEST:
            collective.shapes = np.array([shape or (1,) for shape in shapes], np.int64)
            return TOO_LARGE
        parts = []
        for memory, length, shape in zip(self.bytes[odd], lengths, shapes, strict=True):
            part = memory[:length].copy().view(self._dtype).reshape(shape)
            parts.append(as_buffer_of(collective.buffer, part))
        return parts
