"""`AllToAll`: every rank sends each rank some rows of its buffer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array, itemsize
from mpistrat.communicators.collectives.collective import Collective, described
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.node.small_calls import TOO_LARGE, SizedCall


@dataclass(slots=True)
class AllToAll(Collective):
    """Send each rank some rows of `buffer`: see `Communicator.all_to_all`.

    Attributes:
        out: gets the rows that arrive, in rank order.
        sent, received: the number of rows that go to each rank, and that come from each rank.
        label: words that must be equal on all ranks.
        starts: the `own_starts` of each rank; None: the ranks have not exchanged them yet.
    """

    name: ClassVar[str] = "all_to_all"
    sizes_differ: ClassVar[bool] = True
    buffer: Array
    out: Array
    sent: tuple[int, ...]
    received: tuple[int, ...]
    label: str = ""
    starts: Sequence[Sequence[int]] | None = None

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of `buffer`. Rows lie along the first dimension."""
        return itemsize(self.buffer) * math.prod(self.buffer.shape[1:])

    @property
    def own_starts(self) -> list[int]:
        """For each rank, the index of the first row of `buffer` that goes there; then the number of all rows."""
        return [0, *itertools.accumulate(self.sent)]

    def key(self) -> tuple[Any, ...]:
        buffer = self.buffer
        out = self.out
        kind = buffer.dtype, buffer.shape, out.dtype, out.shape
        return AllToAll, self.label, kind, self.sent, self.received

    def check(self, size: int) -> None:
        """Check the rows, and the counts of rows.

        Raises: ValueError if rows of `buffer` and `out` differ in dtype or shape, or unless `sent` and `received` have
            a count >= 0 for each of `size` ranks that add up to the rows of `buffer` and of `out`.
        """
        buffer = self.buffer
        out = self.out
        row = buffer.dtype, buffer.shape[1:]
        row_of_out = out.dtype, out.shape[1:]
        if not buffer.ndim or row != row_of_out:
            raise ValueError(
                f"all_to_all needs a buffer and an out of rows of one dtype and shape, got {described(buffer)} "
                f"and {described(out)}"
            )
        for name, array, counts in (("sent", buffer, self.sent), ("received", out, self.received)):
            rows = array.shape[0]
            add_up = (len(counts), sum(counts)) == (size, rows)
            if not add_up or min(counts) < 0:
                raise ValueError(
                    f"all_to_all over {size} ranks: {name} must be {size} counts that add up to the "
                    f"{rows} rows, got {list(counts)}"
                )

    def check_arrived(self, rank: int) -> None:
        """Check, after the call, that each rank has sent this `rank` as many rows as `received` says.

        Raises: ValueError if a rank has sent another number of rows.
        """
        if self.starts is None:
            return
        expected = list(self.received)
        arrived = [of_rank[rank + 1] - of_rank[rank] for of_rank in self.starts]
        if arrived != expected:
            raise ValueError(
                f"all_to_all over {len(self.starts)} ranks: rank {rank} expected {expected} rows from the ranks, in "
                f"rank order, and got {arrived}"
            )

    def equal_shape(self) -> str:
        return f"rows of {tuple(self.buffer.shape[1:])}"

    def small_form(self, slots: SharedSlots) -> SizedCall:
        return SmallAllToAll(slots, self)

    def alone(self) -> None:
        self.out[...] = self.buffer


class SmallAllToAll(SizedCall):
    """Each rank writes its `own_starts` before the buffer's bytes."""

    def __init__(self, slots: SharedSlots, collective: AllToAll) -> None:
        super().__init__(slots, collective.buffer, collective.own_starts)
        self._rank = slots.rank
        self._row = collective.row_bytes

    def payload(self, collective: AllToAll) -> np.ndarray:
        collective.out = bytes_of(collective.out)
        return super().payload(collective)

    def take(self, odd: int, collective: AllToAll, payload: np.ndarray) -> object:
        row = self._row
        rank = self._rank
        of_ranks = self.numbers[odd]
        collective.starts = of_ranks
        if max([starts[-1] for starts in of_ranks]) * row > LARGEST:
            collective.starts = [starts.tolist() for starts in of_ranks]
            return TOO_LARGE
        pieces = [
            memory[starts[rank] * row : starts[rank + 1] * row]
            for starts, memory in zip(of_ranks, self.bytes[odd], strict=True)
        ]
        out = collective.out
        if sum(map(len, pieces)) == len(out):  # otherwise the caller raises an error
            np.concatenate(pieces, out=out)
        return None
