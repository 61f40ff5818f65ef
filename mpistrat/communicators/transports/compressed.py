"""`CompressedTransport`: sums gradients in a wire format, in fewer bytes than as float32."""

from __future__ import annotations

from typing import Any, ClassVar

from mpistrat.arrays import dtype_name
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32
from mpistrat.communicators.reduction.as_float32 import reduce_in_place
from mpistrat.communicators.transport import Moves, Transport

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

    def takes(self, collective: AllReduce) -> bool:
        buffer = collective.buffer
        reduction = collective.reduction
        if reduction.compressor is None or reduction.op != "sum" or buffer.nbytes < self._smallest:
            return False
        return dtype_name(buffer).startswith(_DTYPES)

    def all_reduce(self, collective: AllReduce) -> None:
        reduction = collective.reduction
        compressor: Any = reduction.compressor  # `takes` has seen it
        reduce_in_place(
            collective.buffer,
            collective.out,
            reduction.scale,
            lambda values: compressor(self._messages, values.reshape(-1)),
        )

    moves: ClassVar[Moves] = {AllReduce: all_reduce}

    def explain(self, rest: str) -> str:
        return rest
