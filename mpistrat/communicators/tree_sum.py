"""Adding up pieces of memory in the order of a reduction tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, dtype_name
from mpistrat.communicators.arithmetic import Arithmetic, arithmetic_of
from mpistrat.communicators.reduction_tree import ReductionTree

# What is between two additions stays in the caches.
_CHUNK = 1 << 18


class TreeSum(Arithmetic):
    """Of pieces that are the sums that `tree` says its group holds, in this order.

    What is combined is [sums that are left, elements], or where one is left [elements].
    """

    def __init__(self, pairwise: Arithmetic, tree: ReductionTree) -> None:
        self._pairwise, self._tree = pairwise, tree
        self.itemsize = pairwise.itemsize

    def view(self, memory: np.ndarray) -> Any:
        return self._pairwise.view(memory)

    def elements(self, buffer: Array) -> Any:
        return self._pairwise.elements(buffer)

    def totals(self, elements: int) -> Any:
        left = len(self._tree.left)
        totals = self._pairwise.totals(left * elements)
        return totals if left == 1 else totals.reshape(left, elements)

    def combine(self, pieces: Sequence[Any], out: Any, scale: float | None) -> None:
        outs = [out] if len(self._tree.left) == 1 else list(out)
        length, step = len(pieces[0]), _CHUNK // self.itemsize
        for start in range(0, length, step):
            chunk = slice(start, start + step)
            self._combine([piece[chunk] for piece in pieces], [out[chunk] for out in outs], scale)

    def _combine(self, values: list[Any], outs: list[Any], scale: float | None) -> None:
        """`outs` may be some of `values`: they are written only when nothing else of `values` is read any more."""
        tree, combine = self._tree, self._pairwise.combine
        out_of = dict(zip(tree.left, outs, strict=True))
        last = {to: i for i, (to, _) in enumerate(tree.additions)}
        own: set[int] = set()  # values that are memory of ours by now
        for i, (to, added) in enumerate(tree.additions):
            if to in out_of and i == last[to]:
                combine((values[to], values[added]), out_of[to], scale)
                continue
            if to in own:
                target = values[to]
            elif added in own:
                target = values[added]
            else:
                target = self._pairwise.totals(len(values[to]))
            combine((values[to], values[added]), target, None)
            values[to] = target
            own.add(to)
        for position, out in out_of.items():
            if position not in last:
                combine((values[position],), out, scale)


def tree_sum_of(buffer: Array, tree: ReductionTree) -> TreeSum:
    """For the elements of `buffer`. Raises: TypeError where MPI does not know them either."""
    pairwise = arithmetic_of(buffer, "sum")
    if pairwise is None:
        raise TypeError(
            f"{dtype_name(buffer)} cannot be added up in the order of replicas; convert it to float32 or float64 first"
        )
    return TreeSum(pairwise, tree)
