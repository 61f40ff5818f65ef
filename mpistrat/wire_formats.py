"""How sums of gradients cross a network: shorter than float32, and what is lost is made up for later.

A format is given what a message would carry: a float32 slice of the sum over a node, or of one rank's gradients where
ranks share no memory. What it cannot send now it keeps in `residual`, which is added the next time: error feedback
(Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes SignSGD,
ICML 2019).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Protocol

from mpistrat.communicators.communicator import Communicator

if TYPE_CHECKING:
    import torch

__all__ = ["ShortFloats", "TopK", "WireFormat", "name_of"]


def __dir__() -> list[str]:
    return __all__


class WireFormat(Protocol):
    """What `CommunicationOptions(wire_format=)` takes."""

    def combine(
        self, communicator: Communicator, values: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Add up `values` over the ranks of `communicator`, in place. Collective; equal results on all ranks.

        Args:
            communicator: of those between whom messages go: one rank of each node, or all ranks.
            values: float32, 1-D, of equal length on all ranks.
            residual: as long; zeros at first, then as it was left. Not equal on the ranks.
        """


def name_of(wire_format: WireFormat) -> str:
    """The same on all ranks: what a class of a program's own has no words for is called by its name."""
    described = type(wire_format).__repr__ is not object.__repr__
    return repr(wire_format) if described else type(wire_format).__qualname__


@dataclasses.dataclass(frozen=True)
class ShortFloats:
    """Values cross as "bfloat16" or "float16", and are added in float32: half the bytes.

    What is beyond the range of float16 (65504) becomes infinite.
    """

    dtype: str

    def combine(
        self, communicator: Communicator, values: torch.Tensor, residual: torch.Tensor
    ) -> None:
        import torch

        values += residual
        short = values.to(getattr(torch, self.dtype))
        torch.sub(values, short, out=residual)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # of what is infinite nothing remains
        communicator.all_reduce(short)
        values.copy_(short)


@dataclasses.dataclass(frozen=True)
class TopK:
    """Only the largest values cross, with their places, from each rank to all (Aji and Heafield, EMNLP 2017).

    Args:
        fraction: of the values, 0 < fraction <= 1. Each of them takes 8 bytes.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction!r}")

    def combine(
        self, communicator: Communicator, values: torch.Tensor, residual: torch.Tensor
    ) -> None:
        residual += values
        count = min(values.numel(), max(1, int(self.fraction * values.numel())))
        places = residual.abs().nan_to_num_(nan=math.inf).topk(count, sorted=False).indices.int()
        chosen = residual[places]
        residual[places] = 0
        values.zero_()
        of_ranks = communicator.all_gather(places), communicator.all_gather(chosen)
        for places, numbers in zip(*of_ranks, strict=True):  # in rank order: equal on all ranks
            values.index_add_(0, places, numbers)
