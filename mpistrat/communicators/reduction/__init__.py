"""`Reduction`: how a collective combines the buffers of all ranks (operation, label, scale, compression)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

OPS = ("sum", "max", "min", "prod", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")  # of integers

# A function of a `Communicator` and 1-D float32 values: it adds the values up over the communicator's ranks, in place.
Compressor: TypeAlias = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How buffers are combined, element by element. It is equal on all ranks, and the result has the buffers' dtype.

    Attributes:
        op: one of `OPS`: the sum, maximum, minimum or product, or MPI's names of the bitwise "and", "or" and
            exclusive "or" of integers. The maximum or minimum of NaN and a number may be either. Complex numbers
            have sums and products.
        label: words for the reduced values (a structure, parameter names). The ranks must agree on it.
        scale: a factor of the result, for floating-point and complex buffers only; None for none.
        compressor: a function of a communicator and 1-D float32 values; it adds up the values between nodes in
            place, in fewer bytes. It is used for sums of floats of 32 bits or fewer. None sends the values as they are.
        summed_in: "bfloat16" or "float16": collectives of an accelerator's library add floats of 32 bits or fewer in
            this dtype. "": in float32.

    Example:
        >>> from mpistrat.communicators import Reduction
        >>> mean = Reduction("sum", label="loss", scale=0.5)
        >>> mean.agreed, mean.plain == Reduction("sum")
        (('sum', 'loss', 0.5), True)
        >>> mean.compressed_by(None) is mean
        True
    """

    op: str = "sum"
    label: str = ""
    scale: float | None = None
    compressor: Compressor | None = dataclasses.field(default=None, compare=False)
    summed_in: str = ""

    def __post_init__(self) -> None:
        if self.scale is not None:  # ranks may give 1 and 1.0
            object.__setattr__(self, "scale", float(self.scale))

    @functools.cached_property
    def agreed(self) -> tuple[str, str, float | None]:
        """The operation, the label and the scale. They must be equal on all ranks."""
        return self.op, self.label, self.scale

    def compressed_by(self, compressor: Compressor | None) -> Reduction:
        """Return this reduction with `compressor`; `self` if `compressor` is None."""
        if compressor is None:
            return self
        return dataclasses.replace(self, compressor=compressor)

    @property
    def plain(self) -> Reduction:
        """The reduction by the same operation, without label, scale and compressor."""
        return reducing(self.op)


@functools.lru_cache(maxsize=4096)
def reducing(op: str = "sum", label: str = "", scale: float | None = None) -> Reduction:
    """Return the `Reduction` with these attributes; equal arguments give the same object.

    Example:
        >>> from mpistrat.communicators import reducing
        >>> values = np.array([2.0, 4.0])
        >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
        >>> communicator.all_reduce(values, reducing("sum", scale=0.5))
        >>> values
        array([1., 2.])
    """
    return Reduction(op, label, scale)


SUM = reducing()


def as_reduction(reduction: Reduction | str) -> Reduction:
    """Return a `Reduction` as it is; for an operation's name, like "sum", the `Reduction` without label and scale."""
    return reduction if isinstance(reduction, Reduction) else reducing(reduction)
