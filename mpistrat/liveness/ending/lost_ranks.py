"""`LostRanks`: whether ranks were lost while the others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mpi4py import MPI

from mpistrat.liveness.revocable_group import means_rank_lost, revocable_group_of


class LostRanks:
    """This process's knowledge of ranks that were lost.

    Attributes: happened: whether a rank was lost and the other ranks went on without it.
    """

    def __init__(self) -> None:
        self.happened = False
        self._goes_on = False
        self._has_lost: Callable[[], bool] = lambda: False

    def go_on(self, has_lost: Callable[[], bool]) -> None:
        """From now on, let this program go on when a rank dies, even while it waits for all ranks at its end.

        Args: has_lost: returns whether a rank has died, perhaps before MPI notices; any thread may call it.
        Called by: a strategy with parameter servers, once.
        """
        self._goes_on, self._has_lost = True, has_lost

    def has_lost(self, comm: MPI.Intracomm) -> bool:
        """Whether a rank of `comm` has failed and the others go on; False if a rank's death ends the job."""
        group = revocable_group_of(comm)
        if group is not None:
            return group.has_lost()
        if not (self.happened or self._goes_on):
            return False
        if self._has_lost():
            return True
        failed = comm.Get_failed()  # `comm` may be older than the loss
        try:
            return failed.Get_size() > 0
        finally:
            failed.Free()

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Leave the block without an error when MPI raises that a rank is lost, if this program goes on without it."""
        try:
            yield
        except MPI.Exception as error:
            if not self._goes_on or not means_rank_lost(error):
                raise
