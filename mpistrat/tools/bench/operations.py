"""The collectives that a sweep measures: their operands, their expected results, and how their bytes are counted.

Bytes and bandwidths are counted as by nccl-tests (doc/PERFORMANCE.md): `algbw` = bytes / time; `busbw` = algbw times a
factor that makes it the speed of the links for any number of ranks.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from mpistrat import arrays
from mpistrat.communicators import Communicator
from mpistrat.tools.bench.device import HOST, Device


class Operation(abc.ABC):
    """One collective on buffers of one size. Each rank makes the object once, and calls it many times.

    Making it and calling it are collective. Operands are small integers, so that sums are exact in every dtype and
    order.

    Args:
        nbytes: bytes as nccl-tests counts them: the whole result of all_gather, the whole operand of reduce_scatter,
            one rank's buffer for other collectives. Rounded down to whole elements, equally many for each rank.
        in_window: whether the buffer lies in memory that the ranks of a node share; only `AllReduce` uses it.
        device: the device of the operands without `in_window`.

    Attributes:
        count: the number of elements in `nbytes`.
        part: the number of elements of one rank's part; `count` if the buffer has no parts.
        redop: "sum", or "none" for a collective that combines nothing.
        source: this rank's operand.
        result: the buffer for the result.
    """

    redop = "sum"
    splits = False  # whether the buffer consists of one part for each rank

    def __init__(
        self,
        communicator: Communicator,
        nbytes: int,
        dtype: np.dtype[Any],
        in_window: bool,
        device: Device = HOST,
    ) -> None:
        self.communicator = communicator
        self.dtype = dtype
        self.device = device
        self.rank = communicator.rank
        parts = communicator.size if self.splits else 1
        self.part = max(1, nbytes // dtype.itemsize // parts)
        self.count = self.part * parts
        self.nbytes = self.count * dtype.itemsize
        self.source = device.array(self.operand(self.rank, self.count))
        self.result = arrays.copy(self.source)
        self.prepare(in_window)

    @classmethod
    def bus_factor(cls, ranks: int) -> float:
        """Return busbw / algbw for so many ranks: how many bytes cross each link per counted byte."""
        return (ranks - 1) / ranks if cls.splits else 1.0

    def prepare(self, in_window: bool) -> None:  # noqa: B027 - most operations need no other buffers
        """Replace `source` or `result` by another buffer, if the operation needs one. Called by: `__init__`, once."""

    def reset(self) -> None:  # noqa: B027 - most operations do not overwrite their operands
        """Restore operands that the last call has overwritten. Called before each call, and not timed."""

    @abc.abstractmethod
    def __call__(self) -> None: ...

    @abc.abstractmethod
    def expected(self) -> np.ndarray:
        """Return the correct content of `result` on this rank."""

    def wrong(self) -> int:
        """Return the number of elements of this rank's `result` that are not `expected()`."""
        return int((arrays.to_numpy(self.result) != self.expected()).sum())

    def operand(self, rank: int, count: int) -> np.ndarray:
        """Return the operand of `rank`: 1, 2, 3, 1, 2, 3, …, with a start that depends on the rank."""
        return ((np.arange(count) + rank) % 3 + 1).astype(self.dtype)

    def total(self) -> np.ndarray:
        """Return the sum of all ranks' operands."""
        ranks = np.arange(self.communicator.size)
        first_three = np.add.outer(range(3), ranks) % 3 + 1  # elements of each rank's operand
        sums = first_three.sum(axis=1)
        return np.resize(sums.astype(self.dtype), self.count)


class AllReduceOperation(Operation):
    @classmethod
    def bus_factor(cls, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def prepare(self, in_window: bool) -> None:
        memory = self.communicator.memory.window_buffer(self.nbytes) if in_window else None
        self._in_place = memory is not None
        if memory is not None:
            self.result = memory.view(self.dtype)

    def reset(self) -> None:
        if self._in_place:
            self.result[:] = self.source

    def __call__(self) -> None:
        if self._in_place:
            self.communicator.all_reduce(self.result)
        else:
            self.communicator.all_reduce(self.source, out=self.result)

    def expected(self) -> np.ndarray:
        return self.total()


class ReduceOperation(Operation):
    def reset(self) -> None:
        self.result[:] = self.source

    def __call__(self) -> None:
        self.communicator.reduce(self.result)

    def expected(self) -> np.ndarray:
        if self.rank == 0:
            return self.total()
        return self.operand(self.rank, self.count)


class BroadcastOperation(Operation):
    redop = "none"

    def reset(self) -> None:
        if self.rank:
            self.result[:] = 0

    def __call__(self) -> None:
        self.communicator.broadcast(self.result)

    def expected(self) -> np.ndarray:
        return self.operand(0, self.count)


class AllGatherOperation(Operation):
    redop = "none"
    splits = True

    def prepare(self, in_window: bool) -> None:
        self.source = self.device.array(self.operand(self.rank, self.part))

    def __call__(self) -> None:
        self._parts = self.communicator.all_gather(self.source)

    def expected(self) -> np.ndarray:
        ranks = range(self.communicator.size)
        return np.concatenate([self.operand(rank, self.part) for rank in ranks])

    def wrong(self) -> int:
        self.result = arrays.concatenate(self._parts)
        return super().wrong()


class ReduceScatterOperation(Operation):
    splits = True

    def prepare(self, in_window: bool) -> None:
        self.result = self.device.array(np.zeros(self.part, self.dtype))

    def __call__(self) -> None:
        self.communicator.reduce_scatter(self.source, self.result)

    def expected(self) -> np.ndarray:
        return self.total().reshape(-1, self.part)[self.rank]


OPERATIONS: dict[str, type[Operation]] = {
    "all_reduce": AllReduceOperation,
    "broadcast": BroadcastOperation,
    "reduce": ReduceOperation,
    "all_gather": AllGatherOperation,
    "reduce_scatter": ReduceScatterOperation,
}
