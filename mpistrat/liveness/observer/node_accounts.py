"""Accounts: texts and numbers about the activity of the ranks on other nodes, for a node's observer.

The observer has no connection to other nodes. It sets the word ASK in the record of a rank that waits. A thread of this
rank asks ranks of the other nodes over MPI, and writes their accounts, one for each node, to the job's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass

from mpistrat.liveness.records.watch import has_not_come
from mpistrat.machine.private_files import create

_FILE = "elsewhere"


@dataclass(frozen=True)
class Account:
    """The calls, and the present activity, of the ranks of one node.

    A rank of the node makes it. The observer of another node uses it to find ranks that a stalled call waits for.

    Attributes:
        calls: {rank: {communicator: calls}}: for each rank, by its number in the job, the number of collectives that it
            has entered on each communicator, by the hash of the communicator's name. All keys are str, as in JSON.
        lines: lines for a report, with the present activity of the ranks.
    """

    calls: dict[str, dict[str, int]]
    lines: list[str]

    def missing(self, group: int, call: int, members: Collection[int] = ()) -> list[int]:
        """Return the ranks of this node that have not entered call number `call` of a communicator.

        Returns: the ranks' numbers in the job; [] if all have entered the call.
        Args:
            group: the hash of the communicator's name.
            members: ranks of the communicator, as numbers in the job. A member that has not made the communicator
                yet is missing, too; a rank that is no member never is.
        """
        missing = []
        for number, calls in self.calls.items():
            rank = int(number)
            made = calls.get(str(group))
            if has_not_come(made, call, is_member=rank in members):
                missing.append(rank)
        return missing


def leave_accounts(folder: str, accounts: list[Account]) -> None:
    """Write the accounts of the other nodes to the job's folder, so that the observer sees all or none of them.

    Called by: the rank that has asked the other nodes.
    """
    path = os.path.join(folder, _FILE)
    with create(path + ".new") as file:
        json.dump([asdict(account) for account in accounts], file)
    os.replace(path + ".new", path)


def forget_accounts(folder: str) -> None:
    """Remove the accounts of an earlier stall from the job's folder. Called by: the observer, before it asks."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _FILE))


def find_accounts(folder: str) -> list[Account] | None:
    """Return the accounts that a rank has written to the job's folder; None while there are none."""
    path = os.path.join(folder, _FILE)
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        return [Account(**account) for account in json.load(file)]
    return None
