"""`OtherNodes`: a rank asks the ranks of other nodes over MPI for its node's observer, and tells them of failures.

The observer has no connection to other nodes. It sets the word ASK in the record of a rank that waits too long. A
thread of this rank asks two ranks of each other node for an account (a text about the activity of the ranks there), and
writes the accounts to the job's folder. If the ranks are to raise StallError, the thread also sends the report to the
other nodes, because their ranks wait in the same collective. A rank that fails sends its error to the other nodes.
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

RANKS_TO_ASK = 2  # of each node: the first may be unable to answer


@dataclass(frozen=True)
class Ask:
    """A message: rank `asker` asks for the account of the receiver's node. The receiver sends an `Answer`."""

    asker: int


@dataclass(frozen=True)
class Answer:
    """A message that answers an `Ask`: the account of a node; `node` is the lowest rank on it."""

    node: int
    account: Account


@dataclass(frozen=True)
class Raise:
    """A message: the receiver is to raise StallError.

    Attributes:
        report: the text of the error.
        group: the hash of the communicator's name.
        call: the number of the collective that the sender has left with an error: a receiver that stays in it for 1 s
            raises. 0: an observer has found a stall; all receivers raise.
    """

    report: str
    group: int
    call: int = 0


Message = Ask | Answer | Raise | NotedFailure


class OtherNodes:
    """Asks the other nodes about their ranks, and passes failures and stalls on to them, for this node's observer.

    When the observer (a process that watches this node's ranks) sets ASK in this rank's record, `look` asks each other
    node for its account. When all have answered, or after 2 s, it writes the accounts that have come to the job's
    folder. It sends the report of a stall to all ranks of the other nodes, and they raise StallError.
    Made by: `ExitGroup` on every rank; collective over `comm`.
    Args:
        comm: the communicator of the ranks; "other nodes" are the nodes of its ranks, except this rank's node.
        record: this rank's record.
        send: sends a message to a rank of `comm` without waiting; there, `receive` is called with the message.
    Attributes:
        are_some: whether `comm` has ranks on any other node.
        is_first_node: whether rank 0 of `comm` is on this rank's node.
    """

    def __init__(
        self, comm: MPI.Intracomm, record: RankRecord, send: Callable[[Message, int], None]
    ) -> None:
        self._rank = comm.rank
        self._record = record
        self._send = send
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
        # When the other nodes were asked; 0.0: no question is open.
        self._asked_at = 0.0
        self._has_asked = self._raised = False
        self._left: Raise | None = None

    def tell_failure(self, failure: NotedFailure) -> None:
        """Send `failure` to the lowest rank of each other node, for the node's log of errors. Does not wait."""
        with contextlib.suppress(MPI.Exception):  # a rank is lost
            self._send_all(failure, 1)

    def receive(self, message: Message) -> None:
        """Act on a message from another rank of `comm`: answer it, keep it, log it, or have this rank raise StallError.

        Called by: `ExitGroup`.
        """
        record = self._record
        if isinstance(message, Ask):
            # The other node reports the stall: our observer need not.
            record.asked = time.monotonic_ns()
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
        record.abort = RAISE  # written last: the rank acts on it

    def _raise_if_inside(self) -> None:
        """Have this rank raise StallError if it has been for 1 s in a collective that another rank left with an error.

        Before, this rank may be about to leave the collective, too. If it has left it, the message is forgotten.
        """
        message = self._left
        if message is None:
            return
        slots = self._record.slots()
        # For the number of this rank's last call on the communicator, when the rank entered the call (0: it returned).
        entered = {slot.calls: slot.since for slot in slots if slot.group == message.group}
        if min(entered, default=message.call) < message.call:
            return  # this rank has not entered the collective yet
        since = entered.get(message.call, 0)
        if not since:
            self._left = None
        elif time.monotonic_ns() - since > deadlines.RANK_STAYS_IN_LEFT_COLLECTIVE * 1e9:
            self._left = None
            self._raise(message)

    def look(self, now: float) -> None:
        """Ask the other nodes if the observer has set ASK, write their accounts, or pass on the report of a stall.

        First, have this rank raise StallError if it stays in a collective that another rank has left with an error. The
        accounts are written when all nodes have answered, or after 2 s, then without the silent nodes. Does not wait.

        Args: now: the time by `time.monotonic()`.   Called by: `ExitGroup`, a few times a second.
        """
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
            self._asked_at = now
            self._has_asked = True
            self._accounts.clear()
            self._send_all(Ask(self._rank), RANKS_TO_ASK)
        elif has_waited or len(self._accounts) == len(self._others):
            record.ask = 0
            self._asked_at = 0.0
            accounts = [self._accounts[node] for node in sorted(self._accounts)]
            leave_accounts(record.folder, accounts)

    def _send_all(self, message: Message, most: int | None = None) -> None:
        """Send `message` to the `most` lowest ranks of each other node; to all of its ranks if `most` is None."""
        for ranks in self._others.values():
            for rank in ranks[:most]:
                self._send(message, rank)


def _account_of_node(folder: str) -> Account:
    """Return the account of this node's ranks, from the records in `folder`. It takes up to 2 s to ask for stacks."""
    ranks = find_ranks(folder)
    calls = {}
    for rank in ranks:
        calls[str(rank.number)] = {str(group): made for group, made in rank.calls.items()}
    return Account(calls, account_of(ranks))
