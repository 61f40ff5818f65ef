"""Ranks that are lost while the others go on, and how this process knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mpi4py import MPI

from mpistrat.liveness.revocable_group import means_rank_lost, revocable_group_of


class LostRanks:
    """What this process knows of ranks that were lost.

    Attributes: happened: whether a rank was lost and the others went on without it.
    """

    def __init__(self) -> None:
        self.happened = False
        self._goes_on = False
        self._has_lost: Callable[[], bool] = lambda: False

    def go_on(self, has_lost: Callable[[], bool]) -> None:
        """From now on, the death of a rank does not end this program, not even while it waits for all at its end.

        Args: has_lost: whether a rank has died; MPI may notice it later. Called by any thread.
        """
        self._goes_on, self._has_lost = True, has_lost

    def has_lost(self, comm: MPI.Intracomm) -> bool:
        """Whether one of the ranks of `comm` has failed, and the others have gone on without it."""
        group = revocable_group_of(comm)
        if group is not None:
            return group.has_lost()
        if not (self.happened or self._goes_on):
            return False
        if self._has_lost():
            return True
        failed = comm.Get_failed()  # of a communicator that was made before
        try:
            return failed.Get_size() > 0
        finally:
            failed.Free()

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Inside, an error that means a lost rank ends the block, if this program goes on without the lost."""
        try:
            yield
        except MPI.Exception as error:
            if not self._goes_on or not means_rank_lost(error):
                raise
