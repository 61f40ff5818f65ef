"""Calls whose bytes move through slots: see `slots`.

Each class is a kind of call. An object is made once for all calls of one dtype and shape.
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

# Bytes that each rank reads to combine the buffers of all ranks. Of more, a message brings the result sooner.
_MOST_TO_COMBINE = 1 << 17
_LARGEST_OF_MANY = 1 << 12  # however many ranks there are
# What `SmallCall.take` returns if the buffer of a rank did not fit.
TOO_LARGE = object()
_NOTHING = np.empty(0, np.uint8)


class SmallCall(abc.ABC):
    """One kind of call.

    Attributes:
        own: as of `Slot`.
        writes: whether this rank fills its place.
    """

    own: tuple[Any, Any]
    writes = True

    @abc.abstractmethod
    def payload(self, operands: Operands) -> Any:
        """What goes into this rank's place. It makes of `operands.out` what `take` writes to.

        Raises: whatever is wrong with the operands.
        """

    @abc.abstractmethod
    def take(self, odd: int, operands: Operands, payload: Any) -> Any:
        """Read the slots, when all ranks have entered the call, whose number may be `odd`.

        Returns: the call's result, or TOO_LARGE on all ranks.
        """


class SmallAllReduce(SmallCall):
    """Every rank combines all buffers, in rank order."""

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
        buffer, out = operands.buffer, operands.out
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
        even, odd = ([piece[rows].reshape(shape) for piece in pieces] for pieces in self._pieces)
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
    """Takes bytes, after numbers that are always the same."""

    __slots__ = ("_bytes", "_numbers", "_place")

    def __init__(self, numbers: Sequence[int], place: memoryview, memory: np.ndarray) -> None:
        self._numbers = memoryview(array.array("q", numbers))
        self._place, self._bytes = place, memory

    def __setitem__(self, _: object, payload: np.ndarray) -> None:
        self._place[:] = self._numbers
        self._bytes[: len(payload)] = payload


class _Sized(SmallCall):
    """Ranks' buffers may be of different sizes: each rank says numbers of its own, as many as every other.

    A buffer of more than LARGEST is not put there.
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
    """The numbers are the shapes."""

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
    """The numbers are `Operands.own_starts`."""

    def __init__(self, slots: SharedSlots, operands: Operands) -> None:
        super().__init__(slots, operands, operands.own_starts)
        self._rank, self._row = slots.rank, operands.row_bytes

    def payload(self, operands: Operands) -> np.ndarray:
        operands.out = bytes_of(operands.target)
        return super().payload(operands)

    def take(self, odd: int, operands: Operands, payload: np.ndarray) -> object:
        row, rank, of_ranks = self._row, self._rank, self._numbers[odd]
        operands.starts = of_ranks
        if max([starts[-1] for starts in of_ranks]) * row > LARGEST:
            operands.starts = [starts.tolist() for starts in of_ranks]
            return TOO_LARGE
        pieces = [
            memory[starts[rank] * row : starts[rank + 1] * row]
            for starts, memory in zip(of_ranks, self._bytes[odd], strict=True)
        ]
        out = operands.target
        if sum(map(len, pieces)) == len(out):  # else the caller raises an error
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
    """What moves such a call through `slots`; None if it is not small. The same on all ranks."""
    if call not in ("all_gather", "all_to_all"):  # of which the ranks' sizes may differ
        largest = largest_combined(slots.size) if call in ("all_reduce", "reduce") else LARGEST
        if operands.buffer.nbytes > largest:
            return None
        combines = call in ("all_reduce", "reduce", "reduce_scatter")
        if combines and not can_combine(operands.buffer.dtype, operands.reduction.op):
            return None
    return _SMALL_CALLS[call](slots, operands)


def largest_combined(ranks: int) -> int:
    """The bytes of the largest buffer of which each rank combines all."""
    return max(_LARGEST_OF_MANY, min(LARGEST, _MOST_TO_COMBINE // ranks))
