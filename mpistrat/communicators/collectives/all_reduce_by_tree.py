"""`AllReduceByTree`: every rank gets the sum of all ranks' sums, added up in the order of a reduction tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mpistrat.arrays import dtype_name
from mpistrat.communicators.collectives.all_reduce import AllReduce
from mpistrat.communicators.node.slots import SharedSlots
from mpistrat.communicators.reduction.arithmetic import Arithmetic, can_combine
from mpistrat.communicators.reduction.tree import ReductionTree, tree_sum_of


@dataclass(slots=True)
class AllReduceByTree(AllReduce):
    """Add up the sums of all ranks in a fixed order: see `Communicator.all_reduce_by_tree`.

    Attributes:
        buffer: the sums that this rank holds, in rows; the first row gets the result.
        reduction: "sum"; its scale multiplies the result.
        tree: the order of additions.
        out: None.
    """

    name: ClassVar[str] = "all_reduce_by_tree"
    tree: ReductionTree = field(kw_only=True)

    def key(self) -> tuple[Any, ...]:
        sums = self.buffer
        return AllReduceByTree, self.tree.replicas, self.reduction.agreed, sums.dtype, sums.shape

    def check(self, size: int) -> None:
        """Check nothing: `how` raises the errors, on all ranks alike."""

    def words(self) -> tuple[Any, ...]:
        replicas = f"{self.tree.replicas} replicas"
        shape = tuple(self.buffer.shape[1:])
        return self.name, replicas, dtype_name(self.buffer), shape, *self.labels()

    def can_slice(self) -> bool:
        """False also if ranks hold several sums, as ranks of 3, 5, 6, 7, … replicas do."""
        return self.tree.one_each and can_combine(self.buffer.dtype, "sum")

    def how(self) -> Arithmetic:
        return tree_sum_of(self.buffer.dtype, self.tree)

    def small_form(self, slots: SharedSlots) -> None:
        return None

    def alone(self) -> None:
        how = self.how()
        values = how.flat(self.buffer)
        how.combine([values], values, self.reduction.scale)
