"""Wire formats: sums of gradients cross a network in fewer bytes than as float32, and lost digits are sent later.

A wire format adds up float32 values over ranks: a slice of a node's sum, or one rank's gradients where ranks share no
memory. It keeps the part of the values that it does not send in `residual`, and adds `residual` to the values of the
next call. This is error feedback (Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et
al., Error feedback fixes SignSGD, ICML 2019).
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
    """The interface of a wire format: how a sum of gradients crosses a network, in fewer bytes than as float32.

    A program may write its own class, and pass an object of it to `CommunicationOptions(wire_format=)`.

    Example:
        >>> class Whole:
        ...     def combine(self, communicator, values, residual):
        ...         communicator.all_reduce(values)  # sends all digits of float32, so `residual` stays zero
        >>> options = ms.CommunicationOptions(wire_format=Whole())
        >>> ms.wire_formats.name_of(options.wire_format)  # the ranks compare this name
        'Whole'
    """

    def combine(
        self, communicator: Communicator, values: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Add up `values` over the ranks of `communicator`, in place.

        Called by: all ranks of `communicator`. The results must be equal on all of them.

        Args:
            communicator: the ranks that exchange messages: one rank of each node, or all ranks.
            values: float32, 1-D, of equal length on all ranks.
            residual: float32, as long as `values`: this rank's part that was not sent. It is zeros in the first call;
                each call changes it in place for the next call.

        Example:
            >>> values, residual = torch.ones(2), torch.zeros(2)
            >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
            >>> ms.wire_formats.ShortFloats("float16").combine(communicator, values, residual)
            >>> values
            tensor([1., 1.])
        """


def name_of(wire_format: WireFormat) -> str:
    """Return the name of `wire_format` that all ranks compare: its repr, or its class's name if it defines no repr.

    Example:
        >>> ms.wire_formats.name_of(ms.wire_formats.TopK(0.01))
        'TopK(fraction=0.01)'
    """
    described = type(wire_format).__repr__ is not object.__repr__
    return repr(wire_format) if described else type(wire_format).__qualname__


@dataclasses.dataclass(frozen=True)
class ShortFloats:
    """Send values as "bfloat16" or "float16", half the bytes of float32, and add them up in float32.

    The rounding errors go into the residual. Values beyond the range of float16 (65504) become infinite.

    Args:
        dtype: "bfloat16" or "float16".

    Example:
        >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
        >>> values, residual = torch.tensor([1.0, 257.0]), torch.zeros(2)
        >>> ms.wire_formats.ShortFloats("bfloat16").combine(communicator, values, residual)
        >>> values.tolist(), residual.tolist()
        ([1.0, 256.0], [0.0, 1.0])
    """

    dtype: str

    def combine(
        self, communicator: Communicator, values: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Add up `values` over the ranks, in place, and put the rounding errors into `residual`.

        Called by: all ranks of `communicator`.
        Args: values, residual: float32, 1-D, of equal length on all ranks.
        """
        import torch

        values += residual
        short = values.to(getattr(torch, self.dtype))
        torch.sub(values, short, out=residual)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # infinite values leave no residual
        communicator.all_reduce(short)
        values.copy_(short)


@dataclasses.dataclass(frozen=True)
class TopK:
    """Send only the largest values and their indices, from each rank to all ranks (Aji and Heafield, EMNLP 2017).

    A value's magnitude counts after the residual is added, so a value that was not sent can grow until
    it is sent.

    Args:
        fraction: the part of the values that each rank sends, 0 < fraction <= 1, at least one value. A sent value takes
            8 bytes: float32 and a 32-bit index.

    Raises: ValueError if `fraction` is out of range.

    Example:
        >>> communicator = ms.OneDeviceStrategy("cpu").extended.communicator
        >>> values, residual = torch.tensor([1.0, -3.0, 2.0, 0.5]), torch.zeros(4)
        >>> ms.wire_formats.TopK(0.25).combine(communicator, values, residual)
        >>> values.tolist(), residual.tolist()
        ([0.0, -3.0, 0.0, 0.0], [1.0, 0.0, 2.0, 0.5])
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction!r}")

    def combine(
        self, communicator: Communicator, values: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Add up the largest `values` of each rank, in place; the values that are not sent go into `residual`.

        Called by: all ranks of `communicator`.
        Args: values, residual: float32, 1-D, of equal length on all ranks.
        """
        residual += values
        wanted = int(self.fraction * values.numel())
        count = min(values.numel(), max(1, wanted))
        sizes = residual.abs().nan_to_num_(nan=math.inf)
        places = sizes.topk(count, sorted=False).indices.int()
        chosen = residual[places]
        residual[places] = 0
        values.zero_()
        of_ranks = communicator.all_gather(places), communicator.all_gather(chosen)
        for places, numbers in zip(*of_ranks, strict=True):  # in rank order: equal on all ranks
            values.index_add_(0, places, numbers)
