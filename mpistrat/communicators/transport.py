"""A transport: one way of moving bytes between the ranks of a group."""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from mpistrat.arrays import Array, copy, dtype_name, is_torch, itemsize
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32, scale
from mpistrat.communicators.reduction.tree import ReductionTree


@dataclass(slots=True)  # not frozen: that would make each call slower
class Operands:
    """What a transport is called with. Each call reads the operands that it has.

    Attributes:
        buffer: what is combined, handed out or collected.
        reduction: of `all_reduce`, `reduce` and `reduce_scatter`.
        out: the result goes there; None, of `all_reduce`: into `buffer`.
        tree: of `all_reduce`: its order, as of `Communicator.all_reduce_by_tree`; None: any order.
        root: of `reduce` and `broadcast`.
        sent, received: of `all_to_all`: the numbers of rows that go to each rank, and that come from it.
        shapes: of `all_gather`: of all ranks' buffers, a row each, that of a scalar being (1,); None: not known yet.
        starts: of `all_to_all`: `own_starts` of all ranks; None: not known yet.
    """

    buffer: Array
    reduction: Reduction = SUM
    out: Array | None = None
    tree: ReductionTree | None = None
    root: int = 0
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    shapes: np.ndarray | None = None
    starts: Sequence[Sequence[int]] | None = None

    @property
    def target(self) -> Array:
        """Where the result goes."""
        return self.buffer if self.out is None else self.out

    @property
    def row_bytes(self) -> int:
        """The size of a row, along the first dimension, of `buffer`."""
        return itemsize(self.buffer) * math.prod(self.buffer.shape[1:])

    @property
    def own_starts(self) -> list[int]:
        """The first of the rows of `buffer` that go to each rank, and the number of all rows."""
        return [0, *itertools.accumulate(self.sent)]


class Exchange:
    """Moves the bytes of the calls that it takes. Their names are those of `Communicator`.

    Every method is collective: all ranks of the group call it, in the same order.

    Attributes:
        rank: this process's number in the group.
    """

    rank: int

    def all_reduce(self, operands: Operands) -> None:
        self._refuse("all_reduce")

    def add_up(self, buffer: Array) -> None:
        """All-reduce `buffer` in place."""
        self.all_reduce(Operands(buffer))

    def reduce(self, operands: Operands) -> None:
        """By an all-reduce, where there is no better way."""
        total = self._total(operands)
        if self.rank == operands.root:
            operands.buffer[...] = total

    def reduce_scatter(self, operands: Operands) -> None:
        """By an all-reduce, where there is no better way."""
        total, out = self._total(operands), operands.target
        length = out.shape[0] if out.ndim else 1
        out[...] = total[self.rank * length : (self.rank + 1) * length].reshape(out.shape)

    def broadcast(self, operands: Operands) -> None:
        self._refuse("broadcast")

    def all_gather(self, operands: Operands) -> list[Array]:
        self._refuse("all_gather")

    def all_gather_into(self, operands: Operands) -> None:
        """By an all-gather, where there is no better way."""
        parts = self.all_gather(operands)
        rows = operands.target.reshape(len(parts), *operands.buffer.shape)
        for rank, part in enumerate(parts):
            rows[rank] = part

    def all_to_all(self, operands: Operands) -> None:
        self._refuse("all_to_all")

    def _total(self, operands: Operands) -> Array:
        total = copy(operands.buffer)
        self.all_reduce(Operands(total, operands.reduction))
        return total

    def _refuse(self, call: str) -> NoReturn:
        raise TypeError(f"{type(self).__name__} does not take {call}: ask choose() first")


class Transport(Exchange, abc.ABC):
    """One way of moving buffers. A router asks its transports in turn, and the first that takes a call moves its bytes.

    Attributes:
        takes_device_buffers: buffers may be in the memory of an accelerator.
        ordered_by_streams: as of `Communicator`.
    """

    takes_device_buffers = False
    ordered_by_streams = False

    @abc.abstractmethod
    def choose(self, call: str, operands: Operands) -> Exchange | None:
        """What moves the bytes of a call: this transport, or a part of it; None leaves the call to the next transport.

        Collective; the answer is the same on all ranks.
        Args:
            call: the name of the method.
        """

    def wait_until_idle(self) -> None:
        """Return when the collectives of this rank have ended: those that streams order may have returned before."""

    @abc.abstractmethod
    def explain(self, rest: str) -> str:
        """For people: this way, then `rest`, the text of the transports after this one."""


class Unbroken(contextlib.AbstractContextManager[None]):
    """Surrounds a collective that a rank must not leave in its middle, for the others wait for its part.

    Raises: RuntimeError on entering, after a collective that was left by an error.
    Args:
        purpose, call: for the error: "share memory with others", "a collective".
    """

    def __init__(self, purpose: str, call: str = "a collective") -> None:
        self._purpose, self._call = purpose, call
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"this rank cannot {self._purpose} any more: it left {self._call} in its middle, for "
                f"{type(self._error).__name__}, and others may wait for its part. Save what you need "
                "and end the program"
            ) from self._error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = error


def reduce_in_place(operands: Operands, combine: Callable[[Array], None]) -> None:
    """All-reduce by `combine`, which reduces a buffer in place, without the scale.

    It gets floats of 16 and 8 bits as float32; they are rounded once, after they have been scaled.
    """
    buffer, target, factor = operands.buffer, operands.target, operands.reduction.scale
    if dtype_name(buffer).startswith(SUMMED_AS_FLOAT32):
        wide = buffer.float() if is_torch(buffer) else buffer.astype(np.float32)
        combine(wide)
        scale(wide, factor)
        target[...] = wide
        return
    if operands.out is not None:
        target[...] = buffer
    combine(target)
    scale(target, factor)


def combined_as_float32(buffer: Array, reduction: Reduction, combine: Callable[..., None]) -> bool:
    """Let `combine`, of a buffer and a reduction, reduce floats of 16 and 8 bits in place, as `reduce_in_place` does.

    Returns: whether `buffer` has such.
    """
    short = dtype_name(buffer).startswith(SUMMED_AS_FLOAT32)
    if short:
        reduce_in_place(Operands(buffer, reduction), lambda wide: combine(wide, reduction.plain))
    return short
