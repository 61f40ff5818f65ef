"""How the buffers of all ranks are combined, as one value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

OPS = ("sum", "max", "min", "prod", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")  # of integers

# Called with a `Communicator` of the ranks between which messages go, and float32 values, 1-D: adds them up in place.
Compressor: TypeAlias = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How buffers are combined, element by element; equal on all ranks. Their dtype is that of the buffers.

    Attributes:
        op: one of `OPS`: the sum, maximum, minimum or product, or MPI's names of the bitwise "and", "or" and
            exclusive "or" of integers. The maximum or minimum of NaN and a number may be either. Complex numbers
            have sums and products.
        label: says what is reduced (a structure, parameter names). The ranks must agree on it.
        scale: a factor of the result, which must be floating point.
        compressor: adds up, in place, the slices of a sum that go between nodes; for floats of 32 bits or fewer.
        summed_in: "bfloat16" or "float16": an accelerator's own collectives add floats of 32 bits or fewer as such.
            "": as float32.
    """

    op: str = "sum"
    label: str = ""
    scale: float | None = None
    compressor: Compressor | None = dataclasses.field(default=None, compare=False)
    summed_in: str = ""

    def __post_init__(self) -> None:
        if self.scale is not None:  # 1 and 1.0 are the same to all ranks
            object.__setattr__(self, "scale", float(self.scale))

    @functools.cached_property
    def agreed(self) -> tuple[str, str, float | None]:
        """What the ranks must agree on."""
        return self.op, self.label, self.scale

    def compressed_by(self, compressor: Compressor | None) -> Reduction:
        """This reduction with a compressor; itself without one."""
        if compressor is None:
            return self
        return dataclasses.replace(self, compressor=compressor)

    @property
    def plain(self) -> Reduction:
        """The reduction by the same operation, without label, scale and compressor."""
        return reducing(self.op)


@functools.lru_cache(maxsize=4096)
def reducing(op: str = "sum", label: str = "", scale: float | None = None) -> Reduction:
    """The `Reduction` with these attributes; it is made once, then looked up."""
    return Reduction(op, label, scale)


SUM = reducing()


def as_reduction(reduction: Reduction | str) -> Reduction:
    """`reduction`, or the plain one by the operation that a string names."""
    return reduction if isinstance(reduction, Reduction) else reducing(reduction)
