"""What the observer of one node asks of the others goes over MPI, by the threads that watch the ranks.

The observer has no connection of its own: it sets ASK in the record of a rank that waits too long. That rank's watcher
asks two ranks of each other node what the ranks there do, and leaves their accounts in the job's folder. If the stall
is to be raised, it also hands the report on: the ranks of the other nodes wait in the same collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI

from mpistrat.liveness.job_folder import report_of
from mpistrat.liveness.other_accounts import Account, account, leave_accounts
from mpistrat.liveness.record import ABORT, ASK, ASKED, RAISE, STALLED, RankRecord
from mpistrat.machine.private_files import create

SECONDS_TO_ANSWER = 2.0
RANKS_TO_ASK = 2  # of each node, in case the first cannot speak


@dataclass(frozen=True)
class Ask:
    asker: int


@dataclass(frozen=True)
class Told:
    node: int
    account: Account


@dataclass(frozen=True)
class Raise:
    report: str
    group: int  # the hash of the stalled communicator's name


class OtherNodes:
    """The nodes that the ranks of `comm` are on; collective over it.

    Args:
        record: this rank's own.
        tell: sends a message to a rank of `comm`, whose `hear` is called with it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        record: RankRecord,
        tell: Callable[[Ask | Told | Raise, int], None],
    ) -> None:
        self._rank = comm.rank
        self._record = record
        self._tell = tell
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        self._node: int = node.bcast(comm.rank)  # its first rank
        node.Free()
        nodes = comm.allgather(self._node)
        self._others: dict[int, list[int]] = {}  # the ranks of each other node
        for rank, its in enumerate(nodes):
            if its != self._node:
                self._others.setdefault(its, []).append(rank)
        self._accounts: dict[int, Account] = {}
        self._asked_at: float | None = None
        self._raised = False

    def hear(self, message: Ask | Told | Raise) -> None:
        if isinstance(message, Ask):
            self._record.words[ASKED] = (
                time.monotonic_ns()
            )  # the stall is reported there: our observer need not
            self._tell(Told(self._node, account(self._record.folder)), message.asker)
        elif isinstance(message, Told):
            self._accounts.setdefault(message.node, message.account)
        else:
            report = report_of(self._record.folder)
            with contextlib.suppress(OSError), create(report) as file:
                file.write(message.report)
            self._record.words[STALLED] = message.group
            self._record.words[ABORT] = RAISE

    def look(self, now: float) -> None:
        """Called a few times a second."""
        words = self._record.words
        if not self._others or not self._record.folder:
            return
        if self._asked_at is not None and not self._raised and words[ABORT] == RAISE:
            self._raised = True
            with open(report_of(self._record.folder), encoding="utf-8") as file:
                message = Raise(file.read(), words[STALLED])
            for ranks in self._others.values():
                for rank in ranks:
                    self._tell(message, rank)
        if not words[ASK]:
            return
        if self._asked_at is None:
            self._asked_at = now
            for ranks in self._others.values():
                for rank in ranks[:RANKS_TO_ASK]:
                    self._tell(Ask(self._rank), rank)
        elif len(self._accounts) == len(self._others) or now - self._asked_at > SECONDS_TO_ANSWER:
            words[ASK] = 0
            accounts = [self._accounts[node] for node in sorted(self._accounts)]
            leave_accounts(self._record.folder, accounts)
