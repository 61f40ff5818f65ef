"""What moves bytes between the ranks of one group, in one way."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NoReturn

from mpistrat.arrays import Array, copy
from mpistrat.communicators.reduction import SUM, Reduction

if TYPE_CHECKING:
    from mpistrat.communicators.reduction_tree import ReductionTree


class Mover:
    """Moves the bytes of the calls that it takes, under the names and with the operands of `Communicator`'s.

    Every method is collective: all ranks of the group call it, in the same order.

    Attributes:
        rank: this process's number in the group.
    """

    rank: int

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> None:
        """With a `tree`, what `Communicator.all_reduce_by_tree` does."""
        self._refuse("all_reduce")

    def reduce(self, buffer: Array, root: int, reduction: Reduction) -> None:
        """By an all-reduce, where there is no better way."""
        total = copy(buffer)
        self.all_reduce(total, reduction)
        if self.rank == root:
            buffer[...] = total

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction) -> None:
        """By an all-reduce, where there is no better way."""
        total = copy(buffer)
        self.all_reduce(total, reduction)
        length = out.shape[0]
        out[...] = total[self.rank * length : (self.rank + 1) * length]

    def broadcast(self, buffer: Array, root: int) -> None:
        self._refuse("broadcast")

    def all_gather(self, buffer: Array) -> list[Array]:
        self._refuse("all_gather")

    def _refuse(self, call: str) -> NoReturn:
        raise TypeError(f"{type(self).__name__} does not take {call}: ask choose() first")


class Transport(Mover, abc.ABC):
    """One way of moving buffers. A router asks its transports in turn, and the first that takes a call moves its bytes.

    Attributes:
        takes_device_buffers: it takes buffers in the memory of an accelerator.
    """

    takes_device_buffers = False

    @abc.abstractmethod
    def choose(
        self,
        call: str,
        buffer: Array,
        reduction: Reduction = SUM,
        out: Array | None = None,
        tree: ReductionTree | None = None,
    ) -> Mover | None:
        """What moves the bytes of a call: this transport, or a part of it; None leaves the call to the next transport.

        Collective; the answer is the same on all ranks.
        Args:
            call: the name of the method.
            out: of an all-reduce, where it puts its result; None: into `buffer`.
            tree: an all-reduce adds up in its order; None: in any order.
        """

    @abc.abstractmethod
    def explain(self, rest: str) -> str:
        """For people: which way this is, then `rest`, what the transports after this one say."""
