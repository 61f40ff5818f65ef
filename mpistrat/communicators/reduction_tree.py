"""In which order values of replicas are added up, whichever rank they are on.

Neighbours first, (0, 1), (2, 3), …, then neighbouring pairs, and so on; an odd one goes up unchanged. That order is a
function of the number of replicas alone. A rank, or a node, adds up as much of it as it can alone; what is left there
are sums of whole subtrees, each named by the ids of its replicas, for others to add up further.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence


class ReductionTree:
    """The part of the tree above what the ranks of a group hold. Equal on all of them.

    Args:
        replicas: how many there are in all.
        held: for each rank of the group the subtrees whose sums it has.

    Attributes:
        replicas, held: as given.
        additions: pairs of positions in `held`, flattened: the second is added to the first, in this order.
        left: positions of the sums that are complete then, in the order of replicas.
        sums: which subtrees these are.
    """

    def __init__(self, replicas: int, held: Iterable[Sequence[range]]) -> None:
        self.replicas = replicas
        self.held = tuple(tuple(parts) for parts in held)
        self.additions: list[tuple[int, int]] = []
        self.left: list[int] = []
        flat = [part for parts in self.held for part in parts]
        sums: list[
            tuple[range, int]
        ] = []  # finished subtrees, which wait for their right neighbours
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
        """Of one subtree. The left half is a power of two wide; the right one may be cut off by the last replica."""
        end = left.start + 2 * len(left)
        starts = left.start % (2 * len(left)) == 0 and left.stop == right.start
        return starts and right.stop == min(end, self.replicas)

    @property
    def one_each(self) -> bool:
        """Whether every rank holds exactly one sum."""
        return all(len(parts) == 1 for parts in self.held)

    def within(self, ranks: Sequence[int]) -> ReductionTree:
        """What some of the group's ranks can add up among themselves."""
        return ReductionTree(self.replicas, [self.held[rank] for rank in ranks])


@functools.lru_cache
def tree_of_replicas(replicas: int, first: int, end: int) -> ReductionTree:
    """What a rank can add up that has the replicas from `first` to before `end`; each counts as one of the group."""
    return ReductionTree(replicas, [[range(i, i + 1)] for i in range(first, end)])


@functools.lru_cache
def tree_of_ranks(replicas_of_ranks: tuple[int, ...]) -> ReductionTree:
    """Over what ranks hold after each has added up what it can of its replicas, which are in rank order."""
    ends = itertools.accumulate(replicas_of_ranks)
    total = sum(replicas_of_ranks)
    mine = [
        tree_of_replicas(total, end - replicas, end).sums
        for end, replicas in zip(ends, replicas_of_ranks, strict=True)
    ]
    return ReductionTree(total, mine)
