"""The ranks that are left after a loss, and how they agree to go on without the lost ranks.

This file imports mpi4py at its top. Other files import this file on first use, so that `import mpistrat` does not
start MPI.
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

# Stands for the step of a rank that keeps no state.
_NONE = -1
# A recovery has this number among the calls on its communicator: it is higher than all others, as the last call.
_LAST_CALL = 1 << 40


class Survivors:
    """The ranks of a communicator that are left; at first all of its ranks.

    Attributes:
        communicator: a `Communicator` over these ranks; `meet` makes it.
    """

    communicator: Communicator

    def __init__(self, comm: MPI.Intracomm) -> None:
        # The program may use or revoke `comm` itself, so this object has a duplicate.
        with start_deadline("the duplication of a communicator", rank=comm.rank, size=comm.size):
            duplicate = comm.Dup()
        self._group = RevocableGroup(duplicate)

    @property
    def comm(self) -> FaultTolerantComm:
        return self._group.comm

    def meet(self) -> None:
        """Make `communicator`. From now on the job goes on if a rank is lost.

        Called by: every rank that is left, before each call of the training function.
        """
        self.communicator = communicator_for(self.comm, what="run_elastic")
        job_end().records.record.expendable = True

    def has_lost(self, error: Exception) -> bool:
        """Whether a rank is lost: `error` says so, or MPI reports a loss. Then `run_elastic` goes on after `error`."""
        return means_rank_lost(error) or self._group.has_lost()

    def exchange(self, states: dict[int, bytes]) -> None:
        """Send this rank's state to two other ranks, and add the states of two other ranks to `states`.

        So a state is lost only if three ranks are lost. The receivers are the next rank, and the rank half of all ranks
        away, rounded up. One of the two is on another node, if the job has several nodes with as many ranks each. Of
        two ranks, each has one receiver; one rank has none.

        Called by: every rank, when it commits a state.
        Args:
            states: pickled states by rank; at first this rank's alone.
        """
        comm = self.comm
        rank = comm.rank
        size = comm.size
        distances = {1, (size + 1) // 2} if size > 1 else set()
        with self.reported_as("exchange of states", self.communicator.contract.calls):
            for away in distances:
                to = (rank + away) % size
                of = (rank - away) % size
                states[of] = comm.sendrecv(states[rank], to, source=of)

    def all_done(self, done: bool) -> bool:
        """Whether all ranks that are left pass True, and no rank is lost. All ranks get the same answer.

        Called by: each rank that is left, whatever errors it has seen. The call waits for all ranks that are left.
        Args: done: whether this rank has finished its work.
        """
        comm = self.comm
        with contextlib.suppress(MPI.Exception):
            comm.Ack_failed()  # without it Agree raises on all ranks
        with _passing_over_losses():
            return bool(comm.Agree(int(done and not self._group.has_lost())))
        return False

    def go_on(self, last: int | None) -> tuple[list[int], int | None]:
        """Replace the communicator by one without the lost ranks, and agree on the step to go back to.

        Called by: each rank that is left, after `all_done` was False.
        Args:
            last: the step of the newest state that this rank keeps; None if it keeps no state.
        Returns: the lost ranks, by their ranks in the job; and the smallest `last` of all ranks that are left, None if
            a rank keeps no state.
        """
        lost: list[int] = []
        if last is None:
            last = _NONE
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
                # Not allreduce: mpi4py sends it over a hidden duplicate, and nobody would revoke the duplicate.
                step = min(self.comm.allgather(last))
            # All must know the step. Else some ranks would shrink a communicator that others already use.
            if self.all_done(step is not None):
                if step == _NONE:
                    step = None
                return lost, step

    def end(self) -> None:
        """Stop looking for lost ranks, so that a rank that fails from now on ends the job. Called by: `run_elastic`."""
        self._group.stop_looking()
        job_end().records.record.expendable = False
        if self._group.has_lost():  # a rank was lost after all ranks were done
            job_end().end_without_finalize()

    @contextlib.contextmanager
    def reported_as(self, what: str, call: int = _LAST_CALL) -> Iterator[None]:
        """A context that records its block in the rank's record (in shared memory) like a collective call.

        The messages of the block do not go through `communicator`. So a rank that never comes to the block is reported
        like a rank that does not come to a collective.

        Args:
            what: name of the block in the report.
            call: the block's number among the calls on `communicator`; by default the number of the last call.
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
    """A context that ends its block without an error if MPI says that a rank is lost. Other errors are raised."""
    try:
        yield
    except MPI.Exception as error:
        if not means_rank_lost(error):
            raise


def members(comm: MPI.Intracomm, besides: MPI.Intracomm) -> list[int]:
    """Return the ranks of `comm` that are not in `besides`, by their ranks in the job (MPI_COMM_WORLD)."""
    group = comm.Get_group()
    smaller = besides.Get_group()
    world = MPI.COMM_WORLD.Get_group()
    missing = MPI.Group.Difference(group, smaller)
    try:
        return list(missing.Translate_ranks(None, world))
    finally:
        for made in (group, smaller, world, missing):
            if made != MPI.GROUP_EMPTY:
                made.Free()
