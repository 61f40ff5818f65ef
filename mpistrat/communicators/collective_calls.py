"""`CollectiveCalls`: a communicator's collectives of buffers, each made as a value."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from mpistrat.arrays import Array
from mpistrat.communicators.collectives.all_gather import AllGather
from mpistrat.communicators.collectives.all_gather_into import AllGatherInto
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.collectives.all_reduce_by_tree import AllReduceByTree
from mpistrat.communicators.collectives.all_to_all import AllToAll
from mpistrat.communicators.collectives.broadcast import Broadcast
from mpistrat.communicators.collectives.collective import Collective, check_contiguous
from mpistrat.communicators.collectives.reduce import Reduce
from mpistrat.communicators.collectives.reduce_scatter import ReduceScatter
from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.reduction import SUM, Reduction, as_reduction
from mpistrat.communicators.reduction.arithmetic import scale

if TYPE_CHECKING:
    from mpistrat.communicators.reduction.tree import ReductionTree


class CollectiveCalls(Communicator):
    """A communicator that makes a value of each call of a collective, and hands it to `make`."""

    @abc.abstractmethod
    def make(
        self, collective: Collective, cause: Exception | None = None, follows: bool = False
    ) -> Any:
        """Agree with the other ranks on a collective, and move its bytes.

        Args: cause, follows: as in `all_reduce`.
        Returns: for an `AllGather` the list of buffers; for the others None: their results are in the operands.
        """

    def all_reduce(
        self,
        buffer: Array,
        reduction: Reduction | str = SUM,
        *,
        out: Array | None = None,
        cause: Exception | None = None,
        follows: bool = False,
    ) -> None:
        if reduction.__class__ is not Reduction:
            reduction = as_reduction(reduction)
        self.make(AllReduce(buffer, reduction, out), cause, follows)

    def all_reduce_by_tree(
        self, sums: Array, tree: ReductionTree, reduction: Reduction = SUM
    ) -> None:
        self.make(AllReduceByTree(sums, reduction, tree=tree))

    def reduce(self, buffer: Array, root: int = 0, reduction: Reduction | str = SUM) -> None:
        reduction = as_reduction(reduction)
        root = index(root)  # a NumPy integer becomes an int
        self.make(Reduce(buffer, reduction, root))
        if self.rank == root:
            scale(buffer, reduction.scale)

    def reduce_scatter(self, buffer: Array, out: Array, reduction: Reduction | str = SUM) -> None:
        reduction = as_reduction(reduction)
        self.make(ReduceScatter(buffer, reduction, out))
        scale(out, reduction.scale)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> None:
        self.make(Broadcast(buffer, index(root), label))

    def all_gather(self, buffer: Array, *, label: str = "") -> list[Array]:
        gathered: list[Array] = self.make(AllGather(buffer, label))
        return gathered

    def all_gather_into(self, buffer: Array, out: Array, *, label: str = "") -> None:
        with self.raising_together():
            check_contiguous(buffer, out)
        self.make(AllGatherInto(buffer, out, label))

    def all_to_all(
        self,
        buffer: Array,
        out: Array,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        label: str = "",
    ) -> None:
        with self.raising_together():
            check_contiguous(buffer, out)
        collective = AllToAll(buffer, out, tuple(sent), tuple(received), label)
        self.make(collective)
        with self.raising_together():
            collective.check_arrived(self.rank)
