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
    """The arguments of a collective, for a transport. Each collective reads only its own operands.

    Attributes:
        buffer: this rank's input, and the result if `out` is None.
        reduction: how `all_reduce`, `reduce` and `reduce_scatter` combine.
        out: the array that gets the result; None: `buffer` gets it.
        tree: the order of additions in `all_reduce`, see `Communicator.all_reduce_by_tree`; None: any order.
        root: the rank that `reduce` sends to, or `broadcast` sends from.
        sent, received: for `all_to_all`, the number of rows that go to each rank, and that come from each rank.
        shapes: for `all_gather`, an integer array with the shape of each rank's buffer in a row; (1,) for a scalar.
            None: the ranks have not exchanged their shapes yet.
        starts: for `all_to_all`, the `own_starts` of each rank; None: the ranks have not exchanged them yet.
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
        """The array that gets the result: `out`, or `buffer` without `out`."""
        return self.buffer if self.out is None else self.out

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of `buffer`. Rows lie along the first dimension."""
        return itemsize(self.buffer) * math.prod(self.buffer.shape[1:])

    @property
    def own_starts(self) -> list[int]:
        """For each rank, the index of the first row of `buffer` that goes there; then the number of all rows."""
        return [0, *itertools.accumulate(self.sent)]


class Exchange:
    """Moves the bytes of some collectives; its methods are named as in `Communicator`, and check nothing.

    Called by: all ranks of the group, in the same order, when they have agreed on the call.

    Raises: TypeError for a collective that the subclass does not take.

    Attributes:
        rank: this process's number in the group.
    """

    rank: int

    def all_reduce(self, operands: Operands) -> None:
        self._refuse("all_reduce")

    def add_up(self, buffer: Array) -> None:
        """Sum `buffer` over all ranks, in place."""
        self.all_reduce(Operands(buffer))

    def reduce(self, operands: Operands) -> None:
        """Combine on all ranks by `all_reduce`, and keep the result on the root; subclasses may be faster."""
        total = self._total(operands)
        if self.rank == operands.root:
            operands.buffer[...] = total

    def reduce_scatter(self, operands: Operands) -> None:
        """Combine on all ranks by `all_reduce`, and keep this rank's part; subclasses may be faster."""
        total = self._total(operands)
        out = operands.target
        length = out.shape[0] if out.ndim else 1
        first = self.rank * length
        part = total[first : first + length]
        out[...] = part.reshape(out.shape)

    def broadcast(self, operands: Operands) -> None:
        self._refuse("broadcast")

    def all_gather(self, operands: Operands) -> list[Array]:
        self._refuse("all_gather")

    def all_gather_into(self, operands: Operands) -> None:
        """Collect all buffers by `all_gather`, and copy them into `out`; subclasses may be faster."""
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
    """One way to move buffers between ranks: by MPI, by a node's shared memory, by NCCL.

    A router asks its transports in turn, by `choose`; the first that takes a call moves its bytes.

    Attributes:
        takes_device_buffers: whether buffers may be in the memory of an accelerator.
        ordered_by_streams: whether collectives on an accelerator return when they are queued on its stream, not ended.
    """

    takes_device_buffers = False
    ordered_by_streams = False

    @abc.abstractmethod
    def choose(self, call: str, operands: Operands) -> Exchange | None:
        """Return the object that moves the bytes of a call. Collective; all ranks choose alike.

        Args:
            call: the name of the collective, such as "all_reduce".

        Returns: this transport, or another object for its ranks; None leaves the call to the next transport.
        """

    def wait_until_idle(self) -> None:
        """Wait until this rank's collectives have ended on its accelerator, where they return when they are queued.

        Here nothing is to be done: collectives have ended when they return.
        """

    @abc.abstractmethod
    def explain(self, rest: str) -> str:
        """Return a text for people: a line on this transport, then `rest`, the text of the transports after it."""


class Unbroken(contextlib.AbstractContextManager[None]):
    """A context around a collective that no rank may leave in its middle, because the other ranks wait for its part.

    It lets an error of the block pass, and remembers it.

    Args:
        purpose: the thing that this rank can no longer do, for the message: "share memory with others".
        call: words for the collective, for the message.

    Raises: RuntimeError on entering, if an error has left the block before.
    """

    def __init__(self, purpose: str, call: str = "a collective") -> None:
        self._purpose = purpose
        self._call = call
        self._error: BaseException | None = None

    def __enter__(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                f"this rank cannot {self._purpose} any more: it left {self._call} in its middle, for "
                f"{type(self._error).__name__}, and others may wait for its part. Save the results that you need "
                "and end the program"
            ) from self._error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = error


def reduce_in_place(operands: Operands, combine: Callable[[Array], None]) -> None:
    """All-reduce `operands` by `combine`, multiply by the reduction's scale, and write into `out` or `buffer`.

    Args:
        combine: a function of a buffer; it reduces the buffer over the ranks in place, without the scale. Floats of 16
            and 8 bits come as float32, so the result is rounded once, after it is scaled.
    """
    buffer = operands.buffer
    target = operands.target
    factor = operands.reduction.scale
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
    """If `buffer` has floats of 16 or 8 bits, all-reduce it in place as float32, scale it, and round it once.

    Args:
        combine: a function of a buffer and a reduction without scale; it combines the buffer over the ranks, in place.

    Returns: False if `buffer` has another dtype; nothing was done then, and the caller reduces it.

    Called by: transports of accelerators.
    """
    short = dtype_name(buffer).startswith(SUMMED_AS_FLOAT32)
    if short:
        reduce_in_place(Operands(buffer, reduction), lambda wide: combine(wide, reduction.plain))
    return short
