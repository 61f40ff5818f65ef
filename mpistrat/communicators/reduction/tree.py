"""The reduction tree: the order of additions of the replicas' values, and sums in that order.

Replicas 0 and 1, 2 and 3, … are added up first, then neighbouring pairs, and so on; a value without a neighbour goes to
the next level unchanged. The order depends on the number of replicas alone, and not on the rank of a replica. A rank,
or a node, adds up its own replicas as far as the order allows. The sums that remain there are of whole subtrees, each
named by its range of replica ids, and are then added up over the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, name_of_dtype
from mpistrat.communicators.reduction.arithmetic import Arithmetic, arithmetic_of, can_combine

# Bytes that are summed completely before the next bytes, so that the sums stay in the caches.
_CHUNK = 1 << 18


class ReductionTree:
    """The order of additions of the sums that the ranks of a group hold. It is equal on all ranks.

    A position numbers a sum: the sums of rank 0 come first, in their order, then the sums of rank 1, and so on.

    Args:
        replicas: number of replicas on all ranks of the job.
        held: for each rank of the group, its sums, each as the range of the replica ids in the sum.

    Attributes:
        additions: pairs of positions, in the order of additions. The second sum of a pair is added to the first.
        left: positions of the sums that remain after all additions, in the order of replicas; one if the group has all
            replicas.
        sums: the ranges of replica ids of the sums that remain, in the order of `left`.
    """

    def __init__(self, replicas: int, held: Iterable[Sequence[range]]) -> None:
        self.replicas = replicas
        self.held = tuple(tuple(parts) for parts in held)
        self.additions: list[tuple[int, int]] = []
        flat = [part for parts in self.held for part in parts]
        # Finished subtrees and their positions; each waits for its right neighbour.
        sums: list[tuple[range, int]] = []
        for position in sorted(range(len(flat)), key=lambda i: flat[i].start):
            part = flat[position]
            while sums and self._are_halves(sums[-1][0], part):
                left, total = sums.pop()
                self.additions.append((total, position))
                part = range(left.start, part.stop)
                position = total
            sums.append((part, position))
        self.left = [position for _, position in sums]
        self.sums = [part for part, _ in sums]

    def _are_halves(self, left: range, right: range) -> bool:
        """Whether the sums of two ranges of replica ids are added to each other: the two halves of a subtree.

        The right half may be shorter than the left half if it ends with the last replica.
        """
        length = 2 * len(left)
        if left.start % length or left.stop != right.start:
            return False
        return right.stop == min(left.start + length, self.replicas)

    @functools.cached_property
    def one_each(self) -> bool:
        """Whether every rank holds exactly one sum."""
        numbers = {len(parts) for parts in self.held}
        return numbers == {1}

    def within(self, ranks: Sequence[int]) -> ReductionTree:
        """Return the tree over only some `ranks`: the additions that they can make without the other ranks."""
        return ReductionTree(self.replicas, [self.held[rank] for rank in ranks])


@functools.lru_cache
def tree_of_replicas(replicas: int, first: int, end: int) -> ReductionTree:
    """Return the tree over one rank's replicas, from `first` to `end` - 1; each replica is a "rank" of this tree."""
    held = [[range(i, i + 1)] for i in range(first, end)]
    return ReductionTree(replicas, held)


@functools.lru_cache
def tree_of_ranks(replicas_of_ranks: tuple[int, ...]) -> ReductionTree:
    """Return the tree over all ranks, each with the sums that remain when it has added up its own replicas.

    Args: replicas_of_ranks: number of replicas of each rank, in rank order, as replica ids are.
    """
    total = sum(replicas_of_ranks)
    held = []
    first = 0
    for replicas in replicas_of_ranks:
        end = first + replicas
        held.append(tree_of_replicas(total, first, end).sums)
        first = end
    return ReductionTree(total, held)


class TreeSum(Arithmetic):
    """Adds up pieces in the order of `tree`.

    `combine` takes a piece for each position of the tree. Its `out` has the shape [sums that remain, elements], or
    [elements] if one sum remains.

    Args:
        pairwise: adds two pieces of the dtype.
        tree: the order of additions.
    """

    def __init__(self, pairwise: Arithmetic, tree: ReductionTree) -> None:
        self._pairwise = pairwise
        self._tree = tree
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
        step = _CHUNK // self.itemsize
        for start in range(0, len(pieces[0]), step):
            chunk = slice(start, start + step)
            values = [piece[chunk] for piece in pieces]
            self._combine(values, [out[chunk] for out in outs], scale)

    def _combine(self, values: list[Any], outs: list[Any], scale: float | None) -> None:
        """Combine one chunk of the pieces `values` into `outs`, an array for each sum that remains.

        An array of `outs` may be one of `values`, so it is written only by the last addition to its sum.
        """
        additions = self._tree.additions
        combine = self._pairwise.combine
        out_of = dict(zip(self._tree.left, outs, strict=True))
        last = {to: i for i, (to, _) in enumerate(additions)}
        copied: set[int] = set()  # positions of values that are in this function's memory by now
        for i, (to, added) in enumerate(additions):
            pair = (values[to], values[added])
            if to in out_of and i == last[to]:
                combine(pair, out_of[to], scale)
                continue
            if to in copied:
                target = values[to]
            elif added in copied:
                target = values[added]
            else:
                target = self._pairwise.totals(len(values[to]))
            combine(pair, target, None)
            values[to] = target
            copied.add(to)
        for position, out in out_of.items():
            if position not in last:
                combine((values[position],), out, scale)


@functools.lru_cache
def tree_sum_of(dtype: Any, tree: ReductionTree) -> TreeSum:
    """Return the object that adds up elements of `dtype` in `tree`'s order. Raises: TypeError unless it can."""
    if not can_combine(dtype, "sum"):
        raise TypeError(
            f"{name_of_dtype(dtype)} cannot be added up in the order of replicas; convert it to float32 or float64 "
            "first"
        )
    return TreeSum(arithmetic_of(dtype, "sum"), tree)
