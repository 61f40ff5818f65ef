"""Small calls: their bytes move through slots (see `slots`), together with the agreement on the call.

A `SmallCall` is the small form of a collective (`communicators/collectives/`): it serves all calls of one kind.
"""

from __future__ import annotations

import abc
import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.host_views import bytes_of
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.reduction.arithmetic import Arithmetic

# The bytes that each rank may read to combine the buffers of all ranks. For more bytes, a message is faster.
_MOST_TO_COMBINE = 1 << 17
_LARGEST_OF_MANY = 1 << 12  # however many ranks there are
# `SmallCall.take` returns this if the buffer of any rank did not fit into its slot.
TOO_LARGE = object()
_NOTHING = np.empty(0, np.uint8)


class SmallCall(abc.ABC):
    """One kind of call that moves through slots (shared memory that ranks fill before they agree on the call).

    The router calls `payload`, writes the result to the slot, waits for the other ranks, and calls `take`.

    Attributes:
        own: (slot for even calls, slot for odd calls): this rank's two slots, or the root's for a broadcast.
        writes: whether this rank fills its slot; False on the ranks that receive a broadcast.
    """

    own: tuple[Any, Any]
    writes = True

    @abc.abstractmethod
    def payload(self, collective: Any) -> Any:
        """Return the bytes or the array that the caller writes into this rank's slot, where the other ranks read it.

        Called before the ranks meet in the call, so the caller can raise an error of this method on all ranks. The
        method may set `collective.out` to another view of the same memory, for `take` to write into.
        Raises: any error of wrong operands, such as ValueError for a buffer that is not C-contiguous.
        """

    @abc.abstractmethod
    def take(self, odd: int, collective: Any, payload: Any) -> Any:
        """Read all ranks' slots, and write the result into the operands. Called when all ranks have entered the call.

        Args:
            odd: 1 if the call's number is odd, else 0.
            payload: the result of the method `payload`.

        Returns: the list of buffers for an all-gather, None for other calls; TOO_LARGE on all ranks if any rank's
            buffer did not fit into its slot, so that a transport must move the bytes.
        """


class SmallReduction(SmallCall):
    """A call for which ranks write their buffers, and combine all ranks' buffers, in rank order.

    Args:
        how: combines the elements.
        buffer: a buffer of the dtype and shape of all calls.

    Attributes:
        rank: this rank's number.
        how: the argument `how`.
        pieces: for even and for odd calls, the slots as arrays of the dtype and shape.
    """

    def __init__(self, slots: SharedSlots, how: Arithmetic, buffer: Array) -> None:
        self.rank = slots.rank
        self.how = how
        shape = tuple(buffer.shape)
        even, odd = (
            [how.view(place).reshape(shape) for place in places]
            for places in slots.bytes(buffer.nbytes)
        )
        self.own = even[slots.rank], odd[slots.rank]
        self.pieces = even, odd

    def payload(self, collective: Any) -> Any:
        buffer = collective.buffer
        return buffer if buffer.__class__ is np.ndarray else self.how.elements(buffer)


class _SizedSlot:
    """This rank's slot for a `SizedCall`: writing a payload to it also writes the rank's constant sizes."""

    __slots__ = ("_bytes", "_numbers", "_place")

    def __init__(self, numbers: Sequence[int], place: memoryview, memory: np.ndarray) -> None:
        self._numbers = memoryview(array.array("q", numbers))
        self._place = place
        self._bytes = memory

    def __setitem__(self, _: object, payload: np.ndarray) -> None:
        self._place[:] = self._numbers
        self._bytes[: len(payload)] = payload


class SizedCall(SmallCall):
    """A call with buffers that may differ in size between ranks: each rank writes `numbers` (sizes) before its bytes.

    `numbers` has the same length on all ranks. A rank with a buffer of more than LARGEST bytes writes only `numbers`;
    all ranks then see that, and leave the call to a transport.

    Attributes:
        bytes, numbers: for even and for odd calls, the ranks' bytes and sizes.
    """

    def __init__(self, slots: SharedSlots, buffer: Array, numbers: Sequence[int]) -> None:
        self._fits = buffer.nbytes <= LARGEST
        self.bytes = slots.bytes(LARGEST)
        self.numbers = slots.numbers(len(numbers))
        even, odd = (
            _SizedSlot(numbers, places[slots.rank], memories[slots.rank])
            for places, memories in zip(self.numbers, self.bytes, strict=True)
        )
        self.own = even, odd

    def payload(self, collective: Any) -> np.ndarray:
        return bytes_of(collective.buffer) if self._fits else _NOTHING


def largest_combined(ranks: int) -> int:
    """Return the largest size in bytes of a buffer that all of `ranks` ranks combine as a whole from all slots."""
    return max(_LARGEST_OF_MANY, min(LARGEST, _MOST_TO_COMBINE // ranks))
