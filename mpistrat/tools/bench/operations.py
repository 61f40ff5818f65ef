"""The collectives that are measured: their operands, what must come out, and how their bytes are counted.

Bytes and bandwidths are those of nccl-tests (doc/PERFORMANCE.md): `algbw` = bytes / time; `busbw` = algbw times a
factor that makes it the speed of the links, whatever the number of ranks.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from mpistrat.communicators import Communicator


class Operation(abc.ABC):
    """One collective on buffers of one size, made once and called many times.

    Operands are small whole numbers, so that sums are exact in every dtype and order.

    Args:
        nbytes: as nccl-tests counts them: of the whole result of all_gather, the whole operand of reduce_scatter, and
            of one rank's buffer otherwise.
        in_window: operands lie in the memory that ranks share, where the operation can make use of it.

    Attributes:
        count: elements in `nbytes`.
        redop: "sum", or "none" for what combines nothing.
    """

    redop = "sum"
    splits = False  # whether the buffer is made of a part for each rank

    def __init__(
        self, communicator: Communicator, nbytes: int, dtype: np.dtype[Any], in_window: bool
    ) -> None:
        self.communicator, self.dtype = communicator, dtype
        parts = communicator.size if self.splits else 1
        self.count = max(1, nbytes // dtype.itemsize // parts) * parts
        self.nbytes = self.count * dtype.itemsize
        self.prepare(in_window)

    @classmethod
    def bus_factor(cls, ranks: int) -> float:
        """Bytes on each link per byte counted."""
        return (ranks - 1) / ranks if cls.splits else 1.0

    @abc.abstractmethod
    def prepare(self, in_window: bool) -> None:
        """Make the buffers. Called once."""

    def reset(self) -> None:  # noqa: B027 - most overwrite nothing that they read
        """Before each call: operands as they were."""

    @abc.abstractmethod
    def __call__(self) -> None: ...

    @abc.abstractmethod
    def wrong(self) -> int:
        """How many elements of this rank's result are not what they must be."""

    def operand(self, rank: int, count: int) -> np.ndarray:
        """`rank`'s: 1, 2, 3, 1, 2, 3, …, from another place on each rank."""
        return ((np.arange(count) + rank) % 3 + 1).astype(self.dtype)

    def total(self, count: int) -> np.ndarray:
        """The sum of all ranks' operands."""
        size = self.communicator.size
        every_third = [sum((i + rank) % 3 + 1 for rank in range(size)) for i in range(3)]
        return np.resize(np.array(every_third).astype(self.dtype), count)


class AllReduce(Operation):
    @classmethod
    def bus_factor(cls, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def prepare(self, in_window: bool) -> None:
        self._given = self.operand(self.communicator.rank, self.count)
        memory = self.communicator.window_buffer(self.nbytes) if in_window else None
        self._in_place = memory is not None
        self._result = np.empty_like(self._given) if memory is None else memory.view(self.dtype)

    def reset(self) -> None:
        if self._in_place:
            self._result[:] = self._given

    def __call__(self) -> None:
        if self._in_place:
            self.communicator.all_reduce(self._result)
        else:
            self.communicator.all_reduce(self._given, out=self._result)

    def wrong(self) -> int:
        return int((self._result != self.total(self.count)).sum())


class Reduce(Operation):
    def prepare(self, in_window: bool) -> None:
        self._given = self.operand(self.communicator.rank, self.count)
        self._buffer = self._given.copy()

    def reset(self) -> None:
        self._buffer[:] = self._given

    def __call__(self) -> None:
        self.communicator.reduce(self._buffer)

    def wrong(self) -> int:
        expected = self.total(self.count) if self.communicator.rank == 0 else self._given
        return int((self._buffer != expected).sum())


class Broadcast(Operation):
    redop = "none"

    def prepare(self, in_window: bool) -> None:
        self._buffer = self.operand(self.communicator.rank, self.count)

    def reset(self) -> None:
        if self.communicator.rank != 0:
            self._buffer[:] = 0

    def __call__(self) -> None:
        self.communicator.broadcast(self._buffer)

    def wrong(self) -> int:
        return int((self._buffer != self.operand(0, self.count)).sum())


class AllGather(Operation):
    redop = "none"
    splits = True

    def prepare(self, in_window: bool) -> None:
        self._each = self.count // self.communicator.size
        self._given = self.operand(self.communicator.rank, self._each)
        self._parts: list[Any] = []

    def __call__(self) -> None:
        self._parts = self.communicator.all_gather(self._given)

    def wrong(self) -> int:
        return sum(
            int((part != self.operand(rank, self._each)).sum())
            for rank, part in enumerate(self._parts)
        )


class ReduceScatter(Operation):
    splits = True

    def prepare(self, in_window: bool) -> None:
        self._given = self.operand(self.communicator.rank, self.count)
        self._result = np.empty(self.count // self.communicator.size, self.dtype)

    def __call__(self) -> None:
        self.communicator.reduce_scatter(self._given, self._result)

    def wrong(self) -> int:
        each = len(self._result)
        first = self.communicator.rank * each
        return int((self._result != self.total(self.count)[first : first + each]).sum())


OPERATIONS: dict[str, type[Operation]] = {
    "all_reduce": AllReduce,
    "broadcast": Broadcast,
    "reduce": Reduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
}
