"""What the observer of one node learns of the ranks on others.

It has no connection of its own. It sets ASK in the record of a rank that waits; that rank's thread asks ranks of the
other nodes over MPI, and leaves their accounts, one for each node, in the job's folder.
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
    """The ranks of a node: how many calls each has made in each communicator (by its hash), and what they do."""

    calls: dict[str, dict[str, int]]  # by rank; keys are text, as in JSON
    lines: list[str]

    def missing(self, group: int, call: int, members: Collection[int] = ()) -> list[int]:
        """The ranks of the communicator that have not come to its call number `call`.

        Args: members: ranks that are to be in it, and may not have made it yet.
        """
        made = {int(rank): calls.get(str(group)) for rank, calls in self.calls.items()}
        return [r for r in made if has_not_come(made[r], call, is_member=r in members)]


def leave_accounts(folder: str, accounts: list[Account]) -> None:
    path = os.path.join(folder, _FILE)
    with create(path + ".new") as file:
        json.dump([asdict(account) for account in accounts], file)
    os.replace(path + ".new", path)


def forget_accounts(folder: str) -> None:
    """Of an earlier question."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _FILE))


def find_accounts(folder: str) -> list[Account] | None:
    """None as long as there are none."""
    path = os.path.join(folder, _FILE)
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        return [Account(**account) for account in json.load(file)]
    return None
