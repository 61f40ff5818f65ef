"""Sums of gradients that cross a network in a shorter form."""

from __future__ import annotations

from mpistrat.arrays import dtype_name
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32
from mpistrat.communicators.transport import Operands, Transport, reduce_in_place

_DTYPES = ("float32", *SUMMED_AS_FLOAT32)


class CompressedTransport(Transport):
    """Hands sums to their reduction's compressor. It comes before the transports that would send them whole.

    Args:
        messages: a communicator of the same ranks, by which the compressor sends.
        smallest: from so many bytes on a compressor is used. Below, a message costs what an empty one does.
    """

    def __init__(self, messages: Communicator, smallest: int = 0) -> None:
        self._messages, self._smallest = messages, smallest

    def choose(self, call: str, operands: Operands) -> Transport | None:
        buffer, reduction = operands.buffer, operands.reduction
        is_sum = (call, reduction.op, operands.tree) == ("all_reduce", "sum", None)
        if reduction.compressor is None or not is_sum or buffer.nbytes < self._smallest:
            return None
        return self if dtype_name(buffer).startswith(_DTYPES) else None

    def all_reduce(self, operands: Operands) -> None:
        compressor = operands.reduction.compressor
        if compressor is None:
            self._refuse("all_reduce")
        reduce_in_place(operands, lambda values: compressor(self._messages, values.reshape(-1)))

    def explain(self, rest: str) -> str:
        return rest
