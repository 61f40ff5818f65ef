"""`Broadcast`: every rank gets the buffer of one rank, the root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.collectives.collective import Collective
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.node.small_calls import SmallCall


@dataclass(slots=True)
class Broadcast(Collective):
    """Overwrite every rank's `buffer` with the root's: see `Communicator.broadcast`.

    Attributes:
        root: all ranks get the buffer of this rank.
        label: words that must be equal on all ranks.
    """

    name: ClassVar[str] = "broadcast"
    buffer: Array
    root: int = 0
    label: str = ""

    def key(self) -> tuple[Any, ...]:
        return Broadcast, self.label, self.buffer.dtype, self.buffer.shape, self.root

    def roles(self) -> tuple[Any, ...]:
        return (self.root,)

    def small_form(self, slots: SharedSlots) -> SmallCall | None:
        return SmallBroadcast(slots, self) if self.buffer.nbytes <= LARGEST else None


class SmallBroadcast(SmallCall):
    def __init__(self, slots: SharedSlots, collective: Broadcast) -> None:
        even, odd = slots.bytes(collective.buffer.nbytes)
        self.own = even[collective.root], odd[collective.root]
        self.writes = slots.rank == collective.root

    def payload(self, collective: Broadcast) -> np.ndarray:
        return bytes_of(collective.buffer)

    def take(self, odd: int, collective: Broadcast, payload: np.ndarray) -> None:
        if not self.writes:
            payload[:] = self.own[odd]
