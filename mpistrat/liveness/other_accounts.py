"""What the observer of one node learns of the ranks on others.

It has no connection of its own. It sets ASK in the record of a rank that waits; that rank's watcher asks ranks of the
other nodes over MPI, and leaves their accounts, one for each node, in the job's folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from mpistrat.liveness.failure_detector import find_ranks
from mpistrat.liveness.report import account_of
from mpistrat.machine.private_files import create

_FILE = "elsewhere"


@dataclass(frozen=True)
class Account:
    """The ranks of a node: how many calls each has made in each communicator (by its hash), and what they do."""

    calls: dict[str, dict[str, int]]  # by rank; keys are text, as in JSON
    lines: list[str]

    def missing(self, group: int, call: int) -> list[int]:
        """The ranks of the communicator that have not come to its call number `call`."""
        return [
            int(rank) for rank, calls in self.calls.items() if calls.get(str(group), call) < call
        ]


def account(folder: str) -> Account:
    """Of the ranks whose records lie in `folder`; takes up to two seconds if ranks do not answer."""
    ranks = find_ranks(folder)
    calls = {
        str(rank.number): {str(board.group): board.calls for board in rank.record.boards()}
        for rank in ranks
    }
    return Account(calls, account_of(ranks))


def leave_accounts(folder: str, accounts: list[Account]) -> None:
    path = os.path.join(folder, _FILE)
    with create(path + ".new") as file:
        json.dump([asdict(one) for one in accounts], file)
    os.replace(path + ".new", path)


def find_accounts(folder: str) -> list[Account] | None:
    """None as long as there are none."""
    try:
        with open(os.path.join(folder, _FILE), encoding="utf-8") as file:
            return [Account(**one) for one in json.load(file)]
    except FileNotFoundError:
        return None
