"""The order in which the values of replicas are added up, whichever rank they are on; and adding up in that order.

Neighbours come first, (0, 1), (2, 3), …, then neighbouring pairs, and so on; an odd value goes up unchanged. The order
depends on the number of replicas alone. A rank, or a node, adds up what it can of the tree alone. The sums that are
left there are those of whole subtrees, each named by the ids of its replicas; other ranks add them up further.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, name_of_dtype
from mpistrat.communicators.reduction.arithmetic import Arithmetic, arithmetic_of, can_combine

# Bytes that are added up before the next, so that sums stay in the caches.
_CHUNK = 1 << 18


class ReductionTree:
    """The part of the tree above the sums that the ranks of a group hold. It is equal on all of them.

    Args:
        replicas: their number in all.
        held: by rank, the subtrees whose sums the rank has.

    Attributes:
        additions: pairs of positions in `held`, flattened: the second is added to the first, in this order.
        left: positions of the sums that are complete then, in the order of replicas.
        sums: the subtrees of these sums.
    """

    def __init__(self, replicas: int, held: Iterable[Sequence[range]]) -> None:
        self.replicas = replicas
        self.held = tuple(tuple(parts) for parts in held)
        self.additions: list[tuple[int, int]] = []
        flat = [*itertools.chain(*self.held)]
        # Finished subtrees and their positions; they wait for their right neighbours.
        sums: list[tuple[range, int]] = []
        for position in sorted(range(len(flat)), key=lambda i: flat[i].start):
            sums.append((flat[position], position))
            while len(sums) > 1 and self._are_halves(sums[-2][0], sums[-1][0]):
                right, added = sums.pop()
                left, total = sums.pop()
                self.additions.append((total, added))
                sums.append((range(left.start, right.stop), total))
        self.left = [position for _, position in sums]
        self.sums = [part for part, _ in sums]

    def _are_halves(self, left: range, right: range) -> bool:
        """Whether they are halves of a subtree. The left one is a power of two wide; the end may cut the right one."""
        end = left.start + 2 * len(left)
        starts = left.start % (2 * len(left)) == 0 and left.stop == right.start
        return starts and right.stop == min(end, self.replicas)

    @property
    def one_each(self) -> bool:
        """Whether every rank holds exactly one sum."""
        return set(map(len, self.held)) == {1}

    def within(self, ranks: Sequence[int]) -> ReductionTree:
        """The tree of some of the ranks, which add up what they can among themselves."""
        return ReductionTree(self.replicas, [self.held[rank] for rank in ranks])


@functools.lru_cache
def tree_of_replicas(replicas: int, first: int, end: int) -> ReductionTree:
    """The tree of a rank's replicas, from `first` to before `end`; each of them counts as a rank of the group."""
    return ReductionTree(replicas, [[range(i, i + 1)] for i in range(first, end)])


@functools.lru_cache
def tree_of_ranks(replicas_of_ranks: tuple[int, ...]) -> ReductionTree:
    """The tree over the sums that are left when each rank has added up its replicas. Replicas are in rank order."""
    ends = itertools.accumulate(replicas_of_ranks)
    total = sum(replicas_of_ranks)
    held = [
        tree_of_replicas(total, end - replicas, end).sums
        for end, replicas in zip(ends, replicas_of_ranks, strict=True)
    ]
    return ReductionTree(total, held)


class TreeSum(Arithmetic):
    """Adds up pieces, the sums that the ranks of `tree` hold, in its order.

    The result has the shape [sums that are left, elements], or [elements] where one sum is left.
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
        """Combine chunks. `outs` may be some of `values`: an `out` is written when no other value is read any more."""
        tree, combine = self._tree, self._pairwise.combine
        out_of = dict(zip(tree.left, outs, strict=True))
        last = {to: i for i, (to, _) in enumerate(tree.additions)}
        copied: set[int] = set()  # positions of values that are in memory of this function by now
        for i, (to, added) in enumerate(tree.additions):
            if to in out_of and i == last[to]:
                combine((values[to], values[added]), out_of[to], scale)
                continue
            if to in copied:
                target = values[to]
            elif added in copied:
                target = values[added]
            else:
                target = self._pairwise.totals(len(values[to]))
            combine((values[to], values[added]), target, None)
            values[to] = target
            copied.add(to)
        for position, out in out_of.items():
            if position not in last:
                combine((values[position],), out, scale)


@functools.lru_cache
def tree_sum_of(dtype: Any, tree: ReductionTree) -> TreeSum:
    """What adds up elements of `dtype`. Raises: TypeError for a dtype that MPI does not know either."""
    if not can_combine(dtype, "sum"):
        raise TypeError(
            f"{name_of_dtype(dtype)} cannot be added up in the order of replicas; convert it to float32 or float64 "
            "first"
        )
    return TreeSum(arithmetic_of(dtype, "sum"), tree)


@functools.lru_cache
def how_to_combine(dtype: Any, op: str, tree: ReductionTree | None = None) -> Arithmetic:
    """What combines in the order of `tree`; without a tree, in that of the ranks."""
    return arithmetic_of(dtype, op) if tree is None else tree_sum_of(dtype, tree)
