"""Translates `torch.distributed.ReduceOp` into the reductions of our communicators."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpistrat.arrays import numpy_knows
from mpistrat.communicators.reduction import Reduction, reducing
from mpistrat.torch_distributed.tensors import written

_BITWISE = {"BAND": "band", "BOR": "bor", "BXOR": "bxor"}
_OPS = {
    **_BITWISE,
    **{"SUM": "sum", "PREMUL_SUM": "sum", "PRODUCT": "prod", "MAX": "max", "MIN": "min"},
}
# Booleans are combined as bytes of 0 and 1.
_OPS_OF_BOOLEANS = {**_BITWISE, "SUM": "bor", "PRODUCT": "band", "MAX": "bor", "MIN": "band"}


class Combination(NamedTuple):
    """How a `ReduceOp` combines the tensors of all ranks.

    Attributes:
        reduction: the communicator's reduction of the buffers.
        factor: number that multiplies each rank's tensor before the reduction (PREMUL_SUM); None for no factor.
        divisor: integer that divides the result, rounded towards zero (AVG of integers); None for no division. AVG of
            floats has its factor in `reduction`.
        of_numpy: whether a contiguous tensor can be reduced as a NumPy array of its memory. That takes a third of the
            time.
    """

    reduction: Reduction
    factor: Any = None
    divisor: int | None = None
    of_numpy: bool = False


def combination_of(op: Any, dtype: torch.dtype, ranks: int) -> Combination:
    """Return how `op` combines tensors of `dtype`.

    Args:
        op: a `ReduceOp` or one of its constants.
        ranks: number of ranks; AVG divides by it.
    Raises: TypeError for a bitwise `op` of floats or complex numbers, for AVG and PREMUL_SUM of booleans, and for
        float8.
    """
    name = getattr(op, "op", op).name
    if name == "PREMUL_SUM":
        _, factor = op.__getstate__()
        return Combination(_combination(name, dtype, ranks).reduction, factor)
    return _combination(name, dtype, ranks)


@functools.lru_cache(maxsize=256)
def _combination(name: str, dtype: torch.dtype, ranks: int) -> Combination:
    if dtype is torch.bool:
        if name not in _OPS_OF_BOOLEANS:
            raise TypeError(f"ReduceOp.{name} is for numbers, got a tensor of {dtype}")
        return Combination(reducing(_OPS_OF_BOOLEANS[name]))
    numeric = dtype.is_floating_point or dtype.is_complex
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise TypeError(
            f"tensors of {dtype} can be moved, but not combined by ReduceOp.{name}: convert them to bfloat16 first"
        )
    if numeric and name in _BITWISE:
        raise TypeError(f"ReduceOp.{name} is for integers and booleans, got a tensor of {dtype}")
    if name != "AVG":
        return Combination(reducing(_OPS[name]), of_numpy=numpy_knows(dtype))
    if numeric:
        return Combination(reducing("sum", "", 1 / ranks), of_numpy=numpy_knows(dtype))
    return Combination(reducing("sum"), divisor=ranks)


@contextlib.contextmanager
def operand(tensor: Tensor, how: Combination) -> Iterator[Tensor]:
    """Yield a contiguous buffer with the elements of `tensor`, for a reduction in place inside the block.

    The buffer is multiplied by `how.factor` first. Booleans are yielded as uint8. After the block the buffer is divided
    by `how.divisor`, and `tensor` has its contents. The buffer is the tensor's own memory if that is contiguous.
    Called by: `Collectives.all_reduce` and `reduce`.
    """
    with written(tensor) as buffer:
        if how.factor is not None:
            buffer.mul_(how.factor)
        yield buffer.view(torch.uint8) if buffer.dtype is torch.bool else buffer
        if how.divisor is not None:
            buffer.div_(how.divisor, rounding_mode="trunc")
