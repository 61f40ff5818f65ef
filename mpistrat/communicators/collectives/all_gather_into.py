"""`AllGatherInto`: every rank gets all ranks' buffers, of one shape, in one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array, num_elements
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.collective import Collective, Mover, described
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.node.small_calls import SmallCall


@dataclass(slots=True)
class AllGatherInto(Collective):
    """Put the buffers of all ranks into `out`: see `Communicator.all_gather_into`.

    Attributes:
        out: gets the buffers, in rank order.
        label: words that must be equal on all ranks.
    """

    name: ClassVar[str] = "all_gather_into"
    buffer: Array
    out: Array
    label: str = ""

    def key(self) -> tuple[Any, ...]:
        buffer = self.buffer
        out = self.out
        kind = buffer.dtype, buffer.shape, out.dtype, out.shape
        return AllGatherInto, self.label, kind

    def check(self, size: int) -> None:
        """Check `out`.

        Raises: ValueError unless it has `size` times as many elements as `buffer`, and the same dtype.
        """
        buffer = self.buffer
        out = self.out
        expected = size * num_elements(buffer)
        if (num_elements(out), out.dtype) != (expected, buffer.dtype):
            raise ValueError(
                f"all_gather_into over {size} ranks of {described(buffer)} needs an out of "
                f"{size} times as many elements, got {described(out)}"
            )

    def small_form(self, slots: SharedSlots) -> SmallCall | None:
        return SmallAllGatherInto(slots, self) if self.buffer.nbytes <= LARGEST else None

    def alone(self) -> None:
        self.out[...] = self.buffer.reshape(self.out.shape)

    def by_others(self, mover: Mover) -> None:
        """Collect all buffers by an all-gather, and copy them into `out`."""
        parts = mover.move(AllGather(self.buffer))
        rows = self.out.reshape(len(parts), *self.buffer.shape)
        for rank, part in enumerate(parts):
            rows[rank] = part


class SmallAllGatherInto(SmallCall):
    def __init__(self, slots: SharedSlots, collective: AllGatherInto) -> None:
        even, odd = self._pieces = slots.bytes(collective.buffer.nbytes)
        self.own = even[slots.rank], odd[slots.rank]

    def payload(self, collective: AllGatherInto) -> np.ndarray:
        collective.out = bytes_of(collective.out)
        return bytes_of(collective.buffer)

    def take(self, odd: int, collective: AllGatherInto, payload: np.ndarray) -> None:
        np.concatenate(self._pieces[odd], out=collective.out)
