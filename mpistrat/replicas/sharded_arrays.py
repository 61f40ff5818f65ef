"""The arrays that `Strategy.shard` has cut: parts do not say how much they count."""

from __future__ import annotations

from collections.abc import Callable


class ShardedArrays:
    """The arrays that this rank has cut.

    Args:
        tell_once: has the first rank say a text, once.

    Attributes:
        count: calls of `shard` inside `replica()`, while gradients were on.
        first: a checksum of the arrays of the first of these calls; 0 once the ranks have compared it.
        cuts: the arrays that were cut since the last backward, while gradients were on, unless they are as long as a
            loader's step: the size of this replica's part, that of the whole, and the dimension.
    """

    def __init__(self, num_replicas: int, tell_once: Callable[[str], None]) -> None:
        self._num_replicas, self._tell_once = num_replicas, tell_once
        self.count = self.first = 0
        self.cuts: set[tuple[int, int, int]] = set()

    def compared(self, *, same: bool) -> None:
        """The ranks have compared `first`. Args: same: it is equal on all of them."""
        self.first = 0
        if not same:
            self._tell_once(
                "shard: the ranks have given it different arrays, and each has taken a part of its own. If the arrays "
                "are random numbers, seed them alike on every rank (torch.manual_seed). If each rank is to have data "
                "of its own, leave shard out"
            )

    def combine(self, *, alike: bool) -> None:
        """A backward combines the gradients of all parts. Args: alike: parts count alike, whatever their sizes."""
        if alike:
            self.tell_of_uneven()
        self.cuts.clear()

    def tell_of_uneven(self, part: int | None = None) -> None:
        """Parts count alike, all or those of `part` examples: the first rank says so once where their sizes differ."""
        for length, size, dim in self.cuts:
            if size % self._num_replicas and part in (None, length):
                self._tell_once(
                    f"shard: dimension {dim}, of size {size}, does not divide by {self._num_replicas} replicas. A mean "
                    "over a part gives the examples of short parts more weight; choose a size that divides, or scale "
                    "the loss with compute_average_loss(per_example_loss, global_batch_size=...)"
                )
