"""torch's default process group beside a strategy, over the same ranks. The strategy or the program makes it.

Every strategy imports this file. So the file imports torch only when a group is asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpistrat.communicators.communicator import Communicator
from mpistrat.torch_distributed import next_group
from mpistrat.torch_distributed.next_group import has_default_group

# A key in the default group's store. Its value is random: ranks that read the same value are in the same group.
_KEY = "mpistrat/default group"

# Whether every strategy makes a default group, even without torch_distributed=True. `mpistrat run` sets it to True.
with_every_strategy = False


class _Known(NamedTuple):
    """A rank's knowledge of its default group.

    Attributes:
        rank: this process's rank in the group; -1 without a group.
        size: number of ranks of the group; 0 without a group.
        identity: a random text that is equal on all ranks of the group; "" if the group's store cannot keep it.
    """

    rank: int
    size: int
    identity: str


_NO_GROUP = _Known(-1, 0, "")


def share_default_group(what: str, comm: Any, communicator: Communicator) -> None:
    """Make torch's default group over a strategy's ranks if no rank has one; else check the program's group.

    Called by: every rank of `communicator`, when a strategy is made with `torch_distributed=True`, or under
        `mpistrat run` if there is no default group. Collective.
    Args:
        what: the class name of the strategy, for the message.
        comm: the mpi4py communicator of the group's ranks; None for one rank without MPI.
        communicator: the strategy's communicator.
    Raises: RuntimeError on all ranks, if the program's group has other ranks than the strategy, or in another order.
    """
    groups = communicator.all_gather_object(_known(), label="torch's default groups")
    if set(groups) == {_NO_GROUP}:
        before = next_group.comm
        next_group.comm = comm
        try:
            make_default_group()
        finally:
            next_group.comm = before
    elif difference := _difference(groups):
        raise RuntimeError(
            f"{what}(torch_distributed=True) on rank {communicator.rank} of {communicator.size}: the program's default "
            f"group is not over the strategy's ranks in their order: {difference}. Make the group over these ranks, "
            "call torch.distributed.destroy_process_group() before, so that the strategy makes it, or leave out "
            "torch_distributed=True"
        )


def is_wanted() -> bool:
    """Whether a strategy makes a default group without `torch_distributed=True`.

    True under `mpistrat run` (not with `--keep-backend`) while there is no default group.
    """
    return with_every_strategy and not has_default_group()


def move_default_group(comm: Any, *, again: str) -> None:
    """Have the next default group with `init_method="mpi://"` be over the ranks of `comm`.

    Args:
        comm: the mpi4py communicator of these ranks.
        again: the program's name for the backend. The default group, if there is one, is destroyed, and
            a new one is made over `comm` now; the call is collective over `comm`. "" for neither.
    """
    next_group.comm = comm
    if again:
        if has_default_group():
            sys.modules["torch.distributed"].destroy_process_group()
        make_default_group(again)


def leave_default_group() -> None:
    """Abort all of torch's process groups, and give up calls that have not ended. Not collective.

    Does nothing without a default group.
    """
    if has_default_group():
        sys.modules["torch.distributed"].distributed_c10d._abort_process_group()


def make_known_to_torch() -> None:
    """Register the backend "mpistrat" and `mpi://` with torch, if torch has not done so.

    `import torch` registers an installed mpistrat, but not a checkout.
    """
    import mpistrat_torch

    mpistrat_torch.register()


def make_default_group(name: str = "mpistrat") -> None:
    """Make torch's default group. Collective over the ranks of `next_group.comm`.

    Args: name: "mpistrat", or another name that `mpistrat run` replaces.
    """
    import torch.distributed as dist

    make_known_to_torch()
    dist.init_process_group(name, init_method="mpi://")


def _known() -> _Known:
    """Return the rank, size and identity of this process's default group; `_NO_GROUP` without one. Not collective."""
    if not has_default_group():
        return _NO_GROUP
    import torch.distributed as dist

    identity = ""
    with contextlib.suppress(Exception):  # the store of torch's own MPI backend keeps nothing
        store = dist.distributed_c10d._get_default_store()
        identity = store.compare_set(_KEY, "", os.urandom(16).hex()).decode()
    return _Known(dist.get_rank(), dist.get_world_size(), identity)


def _difference(groups: Sequence[_Known]) -> str:
    """Return how the default groups of a strategy's ranks differ from one group over these ranks in their order.

    Args: groups: the knowledge of each rank of the strategy, by rank.
    Returns: a text for the error, with at most eight ranks; "" if there is no difference.
    """
    size = len(groups)
    wrong = []
    for rank, known in enumerate(groups):
        place = "in none"
        if known.size:
            place = f"rank {known.rank} of {known.size} in it"
        if (known.rank, known.size) != (rank, size):
            wrong.append(f"rank {rank} of the strategy is {place}")
    if len(wrong) > 8:
        wrong[8:] = ["…"]
    if wrong:
        return ", ".join(wrong)
    identities = {known.identity for known in groups}
    if len(identities) > 1:
        return f"the ranks are in {len(identities)} different groups"
    return ""
