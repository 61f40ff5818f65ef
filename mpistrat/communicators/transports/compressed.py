"""Sums of gradients that cross a network in a shorter form."""

from __future__ import annotations

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_torch
from mpistrat.communicators.arithmetic import SUMMED_AS_FLOAT32
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction import SUM, Reduction
from mpistrat.communicators.reduction_tree import ReductionTree
from mpistrat.communicators.transports.transport import Transport

_DTYPES = ("float32", *SUMMED_AS_FLOAT32)


class CompressedTransport(Transport):
    """Hands sums whose reduction has a compressor to it; it stands before the transports that would send them whole.

    Args:
        messages: of the same ranks, for what the compressor sends.
        smallest: bytes from which on it pays: a shorter message costs what an empty one does.
    """

    def __init__(self, messages: Communicator, smallest: int = 0) -> None:
        self._messages, self._smallest = messages, smallest

    def choose(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Transport | None:
        is_sum = call == "all_reduce" and reduction.op == "sum" and tree is None
        if reduction.compressor is None or not is_sum:
            return None
        long_enough = buffer.nbytes >= self._smallest
        return self if long_enough and dtype_name(buffer).startswith(_DTYPES) else None

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> None:
        compressor, scale = reduction.compressor, reduction.scale
        assert compressor is not None
        target = buffer if out is None else out
        if dtype_name(buffer) == "float32":
            if out is not None:
                out[...] = buffer
            compressor(self._messages, target.reshape(-1))
            if scale is not None:
                target *= scale
            return
        wide = buffer.float() if is_torch(buffer) else buffer.astype(np.float32)
        compressor(self._messages, wide.reshape(-1))
        target[...] = wide if scale is None else wide * scale  # rounded once

    def explain(self, rest: str) -> str:
        return rest
