"""The ranks that are left, and how they agree on going on without the others.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from mpi4py import MPI

from mpistrat.communicators import Communicator
from mpistrat.communicators.construction import communicator_for, discard
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.liveness.records.record import text_of
from mpistrat.liveness.revocable_group import FaultTolerantComm, RevocableGroup, means_rank_lost

# In the place of a step: this rank keeps none.
_NONE = -1
# The number of a recovery among the calls on a communicator, for which it is the last.
_LAST_CALL = 1 << 40


class Survivors:
    """The ranks of `comm`, later those of them that are left.

    Attributes:
        communicator: ours, over them; made by `meet`.
    """

    communicator: Communicator

    def __init__(self, comm: MPI.Intracomm) -> None:
        # A program of its own may use `comm`, and ours must not be revoked with others.
        with start_deadline("the duplication of a communicator", rank=comm.rank, size=comm.size):
            duplicate = comm.Dup()
        self._group = RevocableGroup(duplicate)

    @property
    def comm(self) -> FaultTolerantComm:
        return self._group.comm

    def meet(self) -> None:
        """Make `communicator`. Collective."""
        self.communicator = communicator_for(self.comm, what="run_elastic")
        job_end().records.record.expendable = True

    def has_lost(self, error: Exception) -> bool:
        """Whether `error` is, or may come of, the loss of a rank."""
        return means_rank_lost(error) or self._group.has_lost()

    def exchange(self, states: dict[int, bytes]) -> None:
        """Add to `states`, this rank's own, those of two other ranks, which are lost if all three are. Collective.

        One is a neighbour, and one is half of all ranks away: on another node, where there are several.
        """
        comm = self.comm
        rank, size = comm.rank, comm.size
        with self.reported_as("exchange of states", self.communicator.contract.calls):
            for away in {1, 2 if size == 3 else size // 2} if size > 1 else ():
                to, of = (rank + away) % size, (rank - away) % size
                states[of] = comm.sendrecv(states[rank], to, source=of)

    def all_done(self, done: bool) -> bool:
        """Whether all ranks that are left are done. Called by: each of them, whatever it has seen. Waits for all."""
        comm = self.comm
        with contextlib.suppress(MPI.Exception):
            comm.Ack_failed()  # else Agree raises on all ranks, as if one were not done
        with _passing_over_losses():
            return bool(comm.Agree(int(done and not self._group.has_lost())))
        return False

    def go_on(self, last: int | None) -> tuple[list[int], int | None]:
        """Leave those that failed behind. Called by: each rank that is left, after `all_done` was False.

        Args: last: the step that this rank has committed last; None for none.
        Returns: who is lost, by the job's numbers; the step that all have committed, None where some rank has none.
        """
        lost: list[int] = []
        while True:
            group = self._group
            group.revoke()
            group.stop_looking()
            smaller = cast("MPI.Intracomm", group.comm.Shrink())
            lost += members(group.comm, besides=smaller)
            discard(group.comm)
            self._group = RevocableGroup(smaller)
            step = None
            with _passing_over_losses():
                # Not allreduce: mpi4py's goes over a duplicate of its own, which nobody would revoke.
                step = min(self.comm.allgather(_NONE if last is None else last))
            # Unless all know it, some would shrink a communicator on which others go on.
            if self.all_done(step is not None):
                return lost, None if step == _NONE else step

    def end(self) -> None:
        """Whoever fails from now on ends the job."""
        self._group.stop_looking()
        job_end().records.record.expendable = False
        if self._group.has_lost():  # one that was done, as all were
            job_end().end_without_finalize()

    @contextlib.contextmanager
    def reported_as(self, what: str, call: int = _LAST_CALL) -> Iterator[None]:
        """Those that do not come to the block are reported as if it were a collective.

        Args: call: its number among the calls on `communicator`; that of the last one, where more are made after it.
        """
        communicator: Communicator | None = getattr(self, "communicator", None)
        watch = None if communicator is None else communicator.contract.watch
        if watch is None:
            yield
            return
        text, length = text_of(what, "run_elastic")
        watch.record.enter(watch.slot, call, text, length)
        try:
            yield
        finally:
            watch.stay_inside(False)


@contextlib.contextmanager
def _passing_over_losses() -> Iterator[None]:
    """Around a call that is left early where a rank is lost."""
    try:
        yield
    except MPI.Exception as error:
        if not means_rank_lost(error):
            raise


def members(comm: MPI.Intracomm, besides: MPI.Intracomm) -> list[int]:
    """Who is in `comm`, but not in `besides`, by the job's numbers."""
    group, smaller, world = comm.Get_group(), besides.Get_group(), MPI.COMM_WORLD.Get_group()
    missing = MPI.Group.Difference(group, smaller)
    try:
        return list(missing.Translate_ranks(None, world))
    finally:
        for made in (group, smaller, world, missing):
            if made != MPI.GROUP_EMPTY:
                made.Free()
