"""The arrays that `Strategy.shard` has cut. The size of a part does not say how large the whole array is."""

from __future__ import annotations

from collections.abc import Callable


class ShardedArrays:
    """Records the arrays that `Strategy.shard` has cut on this rank, to warn of parts with wrong weights in the loss.

    Args:
        tell_once: lets rank 0 print a text, once.

    Attributes:
        count: number of calls of `shard` inside `replica()` while gradients were on.
        first: checksum of the arrays of the first of these calls; 0 once the ranks have compared it.
        cuts: (size of this replica's part, size of the whole, dimension) of each array that was cut since the last
            backward, while gradients were on. Arrays as long as a loader's step are left out.
    """

    def __init__(self, num_replicas: int, tell_once: Callable[[str], None]) -> None:
        self._num_replicas = num_replicas
        self._tell_once = tell_once
        self.count = self.first = 0
        self.cuts: set[tuple[int, int, int]] = set()

    def compared(self, *, same: bool) -> None:
        """Record that the ranks have compared `first`, as they do in a reduction of gradients.

        Args: same: whether `first` was equal on all ranks. If False, rank 0 warns, once, of different arrays.
        """
        self.first = 0
        if not same:
            self._tell_once(
                "shard: the ranks have given it different arrays, and each rank has taken a part of its own array. If "
                "the arrays are random numbers, seed them alike on every rank (torch.manual_seed). If each rank is to "
                "have data of its own, leave shard out"
            )

    def combine(self, *, alike: bool) -> None:
        """Record that a backward combines the gradients of all parts, and forget the cuts.

        Args: alike: whether all replicas' losses get equal weights, whatever the sizes of their parts. If so, rank 0
            warns of parts of different sizes.
        """
        if alike:
            self.tell_of_uneven()
        self.cuts.clear()

    def tell_of_uneven(self, part: int | None = None) -> None:
        """Let rank 0 warn, once, if the replicas' parts of a cut array differ in size.

        Callers know that all replicas' losses get equal weights, so examples in smaller parts weigh more.
        Args: part: look only at cuts that gave this replica a part of this size; None: at all `cuts`.
        """
        for length, size, dim in self.cuts:
            if size % self._num_replicas and part in (None, length):
                self._tell_once(
                    f"shard: dimension {dim}, of size {size}, does not divide by {self._num_replicas} replicas. A mean "
                    "over a part gives the examples of short parts more weight; choose a size that divides, or scale "
                    "the loss with compute_average_loss(per_example_loss, global_batch_size=...)"
                )
