"""Small calls: their bytes move through slots (see `slots`), together with the agreement on the call.

Each class is a kind of call. An object serves all calls of one dtype and shape.
"""

from __future__ import annotations

import abc
import array
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicators.host_views import as_buffer_of, bytes_of, view_of
from mpistrat.communicators.node.slots import LARGEST, SharedSlots
from mpistrat.communicators.reduction.arithmetic import arithmetic_of, can_combine
from mpistrat.communicators.transport import Operands

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
    def payload(self, operands: Operands) -> Any:
        """Return the bytes or the array that the caller writes into this rank's slot, where the other ranks read it.

        Called before the ranks meet in the call, so the caller can raise an error of this method on all ranks. The
        method may set `operands.out` to another view of the same memory, for `take` to write into.
        Raises: any error of wrong operands, such as ValueError for a buffer that is not C-contiguous.
        """

    @abc.abstractmethod
    def take(self, odd: int, operands: Operands, payload: Any) -> Any:
        """Read all ranks' slots, and write the result into the operands. Called when all ranks have entered the call.

        Args:
            odd: 1 if the call's number is odd, else 0.
            payload: the result of the method `payload`.

        Returns: the list of buffers for an all-gather, None for other calls; TOO_LARGE on all ranks if any rank's
            buffer did not fit into its slot, so that a transport must move the bytes.
        """


class SmallAllReduce(SmallCall):
    """An all-reduce: every rank combines all ranks' buffers, in rank order."""

    def __init__(self, slots: SharedSlots, operands: Operands) -> None:
        buffer = operands.buffer
        self._rank = slots.rank
        self._how = how = arithmetic_of(buffer.dtype, operands.reduction.op)
        shape = tuple(buffer.shape)
        even, odd = (
            [how.view(place).reshape(shape) for place in places]
            for places in slots.bytes(int(buffer.nbytes))
        )
        self.own = even[slots.rank], odd[slots.rank]
        self._pieces = even, odd

    def payload(self, operands: Operands) -> Any:
        buffer = operands.buffer
        out = operands.out
        if out is not None and out.__class__ is not np.ndarray:
            operands.out = self._how.elements(out)
        return buffer if buffer.__class__ is np.ndarray else self._how.elements(buffer)

    def take(self, odd: int, operands: Operands, payload: Any) -> None:
        target = payload if operands.out is None else operands.out
        self._how.combine(self._pieces[odd], target, operands.reduction.scale)


class SmallReduce(SmallAllReduce):
    def take(self, odd: int, operands: Operands, payload: Any) -> None:
        if self._rank == operands.root:
            super().take(odd, operands, payload)


class SmallReduceScatter(SmallAllReduce):
    def __init__(self, slots: SharedSlots, operands: Operands) -> None:
        super().__init__(slots, operands)
        shape = tuple(operands.target.shape)
        length = shape[0] if shape else 1
        rows = slice(slots.rank * length, (slots.rank + 1) * length)
        even, odd = self._pieces
        even = [piece[rows].reshape(shape) for piece in even]
        odd = [piece[rows].reshape(shape) for piece in odd]
        self._pieces = even, odd


class SmallBroadcast(SmallCall):
    def __init__(self, slots: SharedSlots, operands: Operands) -> None:
        even, odd = slots.bytes(int(operands.buffer.nbytes))
        self.own = even[operands.root], odd[operands.root]
        self.writes = slots.rank == operands.root

    def payload(self, operands: Operands) -> np.ndarray:
        return bytes_of(operands.buffer)

    def take(self, odd: int, operands: Operands, payload: np.ndarray) -> None:
        if not self.writes:
            payload[:] = self.own[odd]


class SmallAllGatherInto(SmallCall):
    def __init__(self, slots: SharedSlots, operands: Operands) -> None:
        even, odd = self._pieces = slots.bytes(int(operands.buffer.nbytes))
        self.own = even[slots.rank], odd[slots.rank]

    def payload(self, operands: Operands) -> np.ndarray:
        operands.out = bytes_of(operands.target)
        return bytes_of(operands.buffer)

    def take(self, odd: int, operands: Operands, payload: np.ndarray) -> None:
        np.concatenate(self._pieces[odd], out=operands.out)


class _NodeSlot:
    """This rank's slot for a `_Sized` call: writing a payload to it also writes the rank's constant sizes."""

    __slots__ = ("_bytes", "_numbers", "_place")

    def __init__(self, numbers: Sequence[int], place: memoryview, memory: np.ndarray) -> None:
        self._numbers = memoryview(array.array("q", numbers))
        self._place = place
        self._bytes = memory

    def __setitem__(self, _: object, payload: np.ndarray) -> None:
        self._place[:] = self._numbers
        self._bytes[: len(payload)] = payload


class _Sized(SmallCall):
    """A call with buffers that may differ in size between ranks: each rank writes `numbers` (sizes) before its bytes.

    `numbers` has the same length on all ranks. A rank with a buffer of more than LARGEST bytes writes only `numbers`;
    all ranks then see that, and leave the call to a transport.
    """

    def __init__(self, slots: SharedSlots, operands: Operands, numbers: Sequence[int]) -> None:
        self._fits = operands.buffer.nbytes <= LARGEST
        self._bytes = slots.bytes(LARGEST)
        self._numbers = slots.numbers(len(numbers))
        even, odd = (
            _NodeSlot(numbers, places[slots.rank], memories[slots.rank])
            for places, memories in zip(self._numbers, self._bytes, strict=True)
        )
        self.own = even, odd

    def payload(self, operands: Operands) -> np.ndarray:
        return bytes_of(operands.buffer) if self._fits else _NOTHING


class SmallAllGather(_Sized):
    """An all-gather. Each rank writes the shape of its buffer before the buffer's bytes."""

    def __init__(self, slots: SharedSlots, operands: Operands) -> None:
        super().__init__(slots, operands, tuple(operands.buffer.shape))
        self._dtype = view_of(operands.buffer).dtype

    def take(self, odd: int, operands: Operands, payload: np.ndarray) -> list[Array] | object:
        shapes = [place.tolist() for place in self._numbers[odd]]
        lengths = [math.prod(shape) * self._dtype.itemsize for shape in shapes]
        if max(lengths) > LARGEST:
            operands.shapes = np.array([shape or (1,) for shape in shapes], np.int64)
            return TOO_LARGE
        parts = []
        for memory, length, shape in zip(self._bytes[odd], lengths, shapes, strict=True):
            part = memory[:length].copy().view(self._dtype).reshape(shape)
            parts.append(as_buffer_of(operands.buffer, part))
        return parts


class SmallAllToAll(_Sized):
    """An exchange of rows. Each rank writes its `Operands.own_starts` before the buffer's bytes."""

    def __init__(self, slots: SharedSlots, operands: Operands) -> None:
        super().__init__(slots, operands, operands.own_starts)
        self._rank = slots.rank
        self._row = operands.row_bytes

    def payload(self, operands: Operands) -> np.ndarray:
        operands.out = bytes_of(operands.target)
        return super().payload(operands)

    def take(self, odd: int, operands: Operands, payload: np.ndarray) -> object:
        row = self._row
        rank = self._rank
        of_ranks = self._numbers[odd]
        operands.starts = of_ranks
        if max([starts[-1] for starts in of_ranks]) * row > LARGEST:
            operands.starts = [starts.tolist() for starts in of_ranks]
            return TOO_LARGE
        pieces = [
            memory[starts[rank] * row : starts[rank + 1] * row]
            for starts, memory in zip(of_ranks, self._bytes[odd], strict=True)
        ]
        out = operands.target
        if sum(map(len, pieces)) == len(out):  # otherwise the caller raises an error
            np.concatenate(pieces, out=out)
        return None


_SMALL_CALLS: dict[str, Callable[[SharedSlots, Operands], SmallCall]] = {
    "all_reduce": SmallAllReduce,
    "reduce": SmallReduce,
    "reduce_scatter": SmallReduceScatter,
    "broadcast": SmallBroadcast,
    "all_gather": SmallAllGather,
    "all_gather_into": SmallAllGatherInto,
    "all_to_all": SmallAllToAll,
}


def small_call(call: str, slots: SharedSlots, operands: Operands) -> SmallCall | None:
    """Return the object that executes a call through `slots` (shared memory with room for each rank's bytes).

    All ranks return an object, or all return None.
    Returns: None if the buffer is too large for a slot, or if only MPI can combine its dtype; a transport (a way to
        move bytes) then executes the call.
    """
    if call not in ("all_gather", "all_to_all"):  # in these, the ranks' sizes may differ
        largest = largest_combined(slots.size) if call in ("all_reduce", "reduce") else LARGEST
        if operands.buffer.nbytes > largest:
            return None
        combines = call in ("all_reduce", "reduce", "reduce_scatter")
        if combines and not can_combine(operands.buffer.dtype, operands.reduction.op):
            return None
    return _SMALL_CALLS[call](slots, operands)


def largest_combined(ranks: int) -> int:
    """Return the largest size in bytes of a buffer that all of `ranks` ranks combine as a whole from all slots."""
    return max(_LARGEST_OF_MANY, min(LARGEST, _MOST_TO_COMBINE // ranks))
