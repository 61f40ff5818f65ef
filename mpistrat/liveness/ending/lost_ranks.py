"""`LostRanks`: whether ranks were lost, so that the job goes on without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mpi4py import MPI

from mpistrat.liveness.revocable_group import (
    has_failed_rank,
    means_rank_lost,
    revocable_group_of,
)


class LostRanks:
    """Whether ranks of this process's job were lost: ranks that have died while the other ranks go on.

    Attributes: happened: whether this program went on after a loss, and so ends without MPI_Finalize.
    """

    def __init__(self) -> None:
        self.happened = False
        self._goes_on = False
        self._has_lost: Callable[[], bool] = lambda: False

    def go_on(self, has_lost: Callable[[], bool]) -> None:
        """From now on, let this program go on when a rank dies, even while it waits for all ranks at its end.

        Called by: a strategy with parameter servers, once.
        Args: has_lost: returns whether a rank has died; it may know before MPI does. Any thread may call it.
        """
        self._goes_on = True
        self._has_lost = has_lost

    def has_lost(self, comm: MPI.Intracomm) -> bool:
        """Whether a rank of `comm` has failed and the others go on; always False if a rank's death ends the job.

        With parameter servers, the death of any rank of the job counts.
        """
        group = revocable_group_of(comm)
        if group is not None:
            return group.has_lost()
        if not (self.happened or self._goes_on):
            return False
        return self._has_lost() or has_failed_rank(comm)  # `comm` may be older than the loss

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """End the block, without an error, where MPI raises an error because a rank is lost.

        If this program does not go on without lost ranks (`go_on`), and for other errors, the block raises.
        """
        try:
            yield
        except MPI.Exception as error:
            if not self._goes_on or not means_rank_lost(error):
                raise
