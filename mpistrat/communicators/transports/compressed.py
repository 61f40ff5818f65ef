"""`CompressedTransport`: sums gradients in a wire format, in fewer bytes than as float32."""

from __future__ import annotations

from mpistrat.arrays import dtype_name
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32
from mpistrat.communicators.transport import Operands, Transport, reduce_in_place

_DTYPES = ("float32", *SUMMED_AS_FLOAT32)


class CompressedTransport(Transport):
    """Lets the compressor of a reduction (the wire format of gradients) add up the values over the ranks.

    It takes all-reduces by "sum" with a `Reduction.compressor`, of floats of 32 bits or fewer, in any order. A router
    asks it before the transports that send float32.

    Args:
        messages: a communicator of the ranks that this transport connects, for the compressor's messages.
        smallest: the least number of bytes that it takes. To compress fewer bytes gains nothing, because such a message
            takes as long as an empty one.
    """

    def __init__(self, messages: Communicator, smallest: int = 0) -> None:
        self._messages = messages
        self._smallest = smallest

    def choose(self, call: str, operands: Operands) -> Transport | None:
        buffer = operands.buffer
        reduction = operands.reduction
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
