"""All-reduces by a function that combines in place: with an `out`, a scale, and floats of 16 and 8 bits as float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.arrays import Array, dtype_name, is_torch
from mpistrat.communicators.reduction import Reduction
from mpistrat.communicators.reduction.arithmetic import SUMMED_AS_FLOAT32, scale


def reduce_in_place(
    buffer: Array, out: Array | None, factor: float | None, combine: Callable[[Array], None]
) -> None:
    """All-reduce `buffer` by `combine`, multiply by `factor`, and write into `out`, or into `buffer` if it is None.

    Args:
        combine: a function of a buffer; it reduces the buffer over the ranks in place, without the scale. Floats of 16
            and 8 bits come as float32, so the result is rounded once, after it is scaled.
    """
    target = buffer if out is None else out
    if dtype_name(buffer).startswith(SUMMED_AS_FLOAT32):
        wide = buffer.float() if is_torch(buffer) else buffer.astype(np.float32)
        combine(wide)
        scale(wide, factor)
        target[...] = wide
        return
    if out is not None:
        target[...] = buffer
    combine(target)
    scale(target, factor)


def combined_as_float32(
    buffer: Array, reduction: Reduction, combine: Callable[[Array, Reduction], None]
) -> bool:
    """If `buffer` has floats of 16 or 8 bits, all-reduce it in place as float32, scale it, and round it once.

    Args:
        combine: a function of a buffer and a reduction without scale; it combines the buffer over the ranks, in place.

    Returns: False if `buffer` has another dtype; nothing was done then, and the caller reduces it.

    Called by: transports of accelerators.
    """
    short = dtype_name(buffer).startswith(SUMMED_AS_FLOAT32)
    if short:
        plain = reduction.plain
        reduce_in_place(buffer, None, reduction.scale, lambda wide: combine(wide, plain))
    return short
