"""`ExitGroup`: a group's ranks tell its rank 0 in which collective they are stuck, and when their programs end.

The messages go over a duplicate of the group's communicator. A thread of `JobEnd` sends and receives while the main
thread may be in MPI, so this needs MPI_THREAD_MULTIPLE.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI

from mpistrat.liveness import deadlines
from mpistrat.liveness.ending.exit_coordinator import ExitCoordinator, Left, Waits
from mpistrat.liveness.ending.lost_ranks import LostRanks
from mpistrat.liveness.ending.program_exit import ProgramExit
from mpistrat.liveness.error_text import told_of
from mpistrat.liveness.observer.other_nodes import Answer, Ask, OtherNodes, Raise
from mpistrat.liveness.records.failure_log import NotedFailure
from mpistrat.liveness.records.record import SINCE, RankRecord
from mpistrat.liveness.records.watch import WatchedCalls
from mpistrat.liveness.revocable_group import revocable_group_of


class ExitGroup:
    """Lets the ranks of `comm` tell each other that they are stuck or that their programs have ended.

    The constructor is collective over `comm`, and duplicates it. Made by: `JobEnd.watch`, for the first communicator
    over these ranks.

    Args:
        who: a description of this rank for messages.
        record: this rank's record.
        losses: whether ranks were lost and the others go on without them.
    Attributes:
        other_nodes: the nodes of the group's ranks, except this rank's node.
        watched: the calls on the group's communicators; `JobEnd.watch` appends to the list.
        coordinator: the exit coordinator. Only the coordinator of the group's rank 0 gets messages and decides.
    """

    def __init__(
        self, comm: MPI.Intracomm, who: str, record: RankRecord, losses: LostRanks
    ) -> None:
        self._revocable_group = revocable_group_of(comm)
        self._members = comm.Get_group()
        self._comm = comm.Dup()
        self._who = who
        self._losses = losses
        self.watched: list[WatchedCalls] = []
        # By communicator name, the number of the last reported call.
        self._reported: dict[str, int] = {}
        # All ranks report to rank 0: the coordinators of other ranks have no ranks to decide about.
        self.coordinator = ExitCoordinator(comm.size if comm.rank == 0 else 0)
        self.other_nodes = OtherNodes(self._comm, record, self._send)
        self._sending = threading.Lock()
        self._unsent: list[MPI.Request] = []
        self._all_ended = MPI.REQUEST_NULL

    def covers(self, comm: MPI.Intracomm) -> bool:
        """Whether the group has all ranks of `comm`, and both have the same revocable group, or none."""
        group = comm.Get_group()
        translated = group.Translate_ranks(None, self._members)
        group.Free()
        alike = revocable_group_of(comm) is self._revocable_group
        return alike and MPI.UNDEFINED not in translated

    @property
    def lost(self) -> bool:
        """Whether a rank of the group has failed and the other ranks go on. Then nobody uses this group any more."""
        return self._losses.has_lost(self._comm)

    def calls(self) -> Iterator[WatchedCalls]:
        """Yield the calls on the communicators of this group, and on all communicators made from them."""
        return _with_parts(self.watched)

    def look(self) -> bool:
        """Report each collective that this rank has been in for more than 0.5 s to the exit coordinator, once.

        Then receive messages. Called by: the thread of `JobEnd`, five times a second.
        Returns: whether such a collective was reported now for the first time.
        """
        now = time.monotonic_ns()
        stuck = False
        for calls in self.calls():
            call = calls.calls
            collective = calls.waiting_in
            watch = calls.watch
            # Read last: each call sets it anew.
            since = watch.record.words[watch.slot + SINCE]
            lasted = (now - since) / 1e9
            if collective is None or not since or lasted < deadlines.RANK_IS_STUCK:
                continue
            if self._reported.get(calls.name) != call:
                self._reported[calls.name] = call
                stuck = True
                where = f"{collective}\n      at {calls.called_at}"
                raised = watch.left_out
                if calls.raising:
                    raised = told_of(calls.raising, MPI.COMM_WORLD.rank)
                self._send(Waits(self._who, calls.name, call, where, raised))
        self._receive()
        return stuck

    def tell(self, message: Raise) -> None:
        """Send `message` to all other ranks of the group, unless the group has lost a rank. Does not wait."""
        for rank in range(self._comm.size):
            if rank != self._comm.rank and not self.lost:
                self._send(message, rank)

    def leave(self, end: ProgramExit) -> None:
        """Tell the exit coordinator how this rank's program has ended, and call `end`. Does not wait."""
        rank = MPI.COMM_WORLD.rank
        calls = {calls.name: calls.calls for calls in self.calls()}
        self._send(Left(rank, self._who, end.how, end.code, calls))
        self.end()

    def end(self) -> None:
        """Start a barrier of the group's ranks, because this rank's program has ended; `all_ended` asks about it."""
        self._all_ended = self._comm.Ibarrier()

    def all_ended(self) -> bool:
        """Whether the programs of all ranks of the group have ended and this rank's messages have been sent.

        It receives messages, and does not wait. Called by: `JobEnd`, after `leave` or `end`, until it is True.
        """
        self._receive()
        with self._sending:
            self._forget_sent()
        return self._all_ended.Test() and self.coordinator.all_left() and not self._unsent

    def _send(self, message: Any, rank: int = 0) -> None:
        with self._sending:  # any thread of a rank may send its failure
            self._forget_sent()
            self._unsent.append(self._comm.isend(message, rank))

    def _forget_sent(self) -> None:
        self._unsent = [request for request in self._unsent if not request.Test()]

    def _receive(self) -> None:
        now = time.monotonic()
        while (arrived := self._comm.improbe()) is not None:
            message = arrived.recv()
            if isinstance(message, (Ask, Answer, Raise, NotedFailure)):
                self.other_nodes.receive(message)
            else:
                self.coordinator.receive(message, now)
        self.other_nodes.look(now)


def _with_parts(communicators: Sequence[WatchedCalls]) -> Iterator[WatchedCalls]:
    for communicator in list(communicators):
        yield communicator
        yield from _with_parts(communicator.parts)
