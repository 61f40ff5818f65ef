"""How the observer of one node asks the ranks of other nodes: over MPI, by the ranks' own threads.

The observer has no connection of its own: it sets ASK in the record of a rank that waits too long. That rank's thread
asks two ranks of each other node what the ranks there do, and leaves their accounts in the job's folder. If the stall
is to be raised, it also hands the report on: the ranks of the other nodes wait in the same collective. A rank that
fails tells the other nodes by which error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI

from mpistrat.liveness import deadlines
from mpistrat.liveness.observer.failure_detector import find_ranks
from mpistrat.liveness.observer.node_accounts import Account, leave_accounts
from mpistrat.liveness.observer.report import account_of
from mpistrat.liveness.records.failure_log import FailureLog, NotedFailure
from mpistrat.liveness.records.job_folder import report_of
from mpistrat.liveness.records.record import RAISE, RankRecord
from mpistrat.machine.private_files import create

RANKS_TO_ASK = 2  # of each node, in case the first cannot speak


@dataclass(frozen=True)
class Ask:
    asker: int


@dataclass(frozen=True)
class Answer:
    node: int
    account: Account


@dataclass(frozen=True)
class Raise:
    report: str
    group: int  # the hash of the stalled communicator's name
    # The collective that a rank has left for an error; 0: the observer has found the stall.
    call: int = 0


Message = Ask | Answer | Raise | NotedFailure


class OtherNodes:
    """The nodes that the ranks of `comm` are on; collective over it.

    Args:
        record: this rank's own.
        send: sends a message to a rank of `comm`, whose `receive` is called with it.
    Attributes:
        are_some: whether there is any other node.
        is_first_node: whether this rank's node has rank 0.
    """

    def __init__(
        self, comm: MPI.Intracomm, record: RankRecord, send: Callable[[Message, int], None]
    ) -> None:
        self._rank, self._record, self._send = comm.rank, record, send
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        self._node: int = node.bcast(comm.rank)  # its first rank
        node.Free()
        self._others: dict[int, list[int]] = {}  # the ranks of each other node
        for rank, first in enumerate(comm.allgather(self._node)):
            if first != self._node:
                self._others.setdefault(first, []).append(rank)
        self.are_some = bool(self._others)
        self.is_first_node = self._node == 0
        self._accounts: dict[int, Account] = {}  # by node
        # When the other nodes were asked what they have not answered yet; 0.0: nothing.
        self._asked_at = 0.0
        self._has_asked = self._raised = False
        self._left: Raise | None = None

    def tell_failure(self, failure: NotedFailure) -> None:
        """Have the other nodes note it in their folders."""
        with contextlib.suppress(MPI.Exception):  # a rank is lost
            self._send_all(failure, 1)

    def receive(self, message: Message) -> None:
        record = self._record
        if isinstance(message, Ask):
            record.asked = time.monotonic_ns()  # that node reports the stall: our observer need not
            self._send(Answer(self._node, _account_of_node(record.folder)), message.asker)
        elif isinstance(message, Answer):
            self._accounts.setdefault(message.node, message.account)
        elif isinstance(message, NotedFailure):
            with contextlib.suppress(OSError):  # there is no folder
                FailureLog(record.folder, record.rank, record.size).note(message)
        elif message.call:
            self._left = message
        else:
            self._raise(message)

    def _raise(self, message: Raise) -> None:
        record = self._record
        with contextlib.suppress(OSError), create(report_of(record.folder)) as file:
            file.write(message.report)
        record.stalled = message.group
        record.abort = RAISE  # last: the rank acts on it

    def _raise_if_inside(self) -> None:
        """Raise on this rank if it stays in a collective that another has left; it may be about to leave, too."""
        message = self._left
        if message is None:
            return
        # When this rank entered its last call of the communicator, by the number of the call
        entered = {b.calls: b.since for b in self._record.slots() if b.group == message.group}
        if min(entered, default=message.call) < message.call:
            return  # the collective comes next
        since = entered.get(message.call, 0)
        if not since:
            self._left = None
        elif time.monotonic_ns() - since > deadlines.RANK_STAYS_IN_LEFT_COLLECTIVE * 1e9:
            self._left = None
            self._raise(message)

    def look(self, now: float) -> None:
        """Called a few times a second, with `time.monotonic()`."""
        record = self._record
        self._raise_if_inside()
        if not self._others:
            return
        if self._has_asked and not self._raised and record.abort == RAISE:
            self._raised = True
            with open(report_of(record.folder), encoding="utf-8") as file:
                self._send_all(Raise(file.read(), record.stalled))
        if not record.ask:
            return
        has_waited = now - self._asked_at > deadlines.NODE_WAITS_FOR_OTHER_NODES
        if not self._asked_at:
            self._asked_at, self._has_asked = now, True
            self._accounts.clear()
            self._send_all(Ask(self._rank), RANKS_TO_ASK)
        elif has_waited or len(self._accounts) == len(self._others):
            record.ask, self._asked_at = 0, 0.0
            leave_accounts(record.folder, [self._accounts[node] for node in sorted(self._accounts)])

    def _send_all(self, message: Message, most: int | None = None) -> None:
        """To all ranks of each other node, or to the first ones."""
        for ranks in self._others.values():
            for rank in ranks[:most]:
                self._send(message, rank)


def _account_of_node(folder: str) -> Account:
    """Of the ranks whose records lie in `folder`; takes up to two seconds if ranks do not answer."""
    ranks = find_ranks(folder)
    calls = {str(r.number): {str(group): made for group, made in r.calls.items()} for r in ranks}
    return Account(calls, account_of(ranks))
