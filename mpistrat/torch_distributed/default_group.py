"""torch's default group beside a strategy: over the same ranks, made by the strategy or by the program.

torch is imported when a group is asked for, and not with this file, which comes with every strategy.
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

# The key in the store of a default group by which its ranks know that they are in the same one.
_KEY = "mpistrat/default group"

# Whether strategies make a default group without being asked: `mpistrat run` sets it.
with_every_strategy = False


class _Known(NamedTuple):
    """What a rank knows of the default group that it is in."""

    rank: int
    size: int
    identity: str


_NO_GROUP = _Known(-1, 0, "")


def share_default_group(what: str, comm: Any, communicator: Communicator) -> None:
    """Make torch's default group over the ranks of a strategy, or use the one that the program has made.

    Called by: every rank of `communicator`.
    Args:
        what: the class of the strategy.
        comm: mpi4py's communicator of the same ranks; None for one rank without MPI.
    Raises: RuntimeError on all ranks, when the program's group has other ranks, or in another order.
    """
    groups = communicator.all_gather_object(_known(), label="torch's default groups")
    if set(groups) == {_NO_GROUP}:
        before, next_group.comm = next_group.comm, comm
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
    """Whether a strategy that is not asked makes a default group: under `mpistrat run`, where there is none yet."""
    return with_every_strategy and not has_default_group()


def move_default_group(comm: Any, *, again: bool) -> None:
    """From now on `init_method="mpi://"` is over the ranks of `comm`.

    Args: again: a default group is made over them now, in place of the one that there is, or was; collective then.
    """
    next_group.comm = comm
    if again:
        if has_default_group():
            sys.modules["torch.distributed"].destroy_process_group()
        make_default_group()


def leave_default_group() -> None:
    """Abort torch's default group, if there is one, and all others: calls on their way are left. Not collective."""
    if has_default_group():
        sys.modules["torch.distributed"].distributed_c10d._abort_process_group()


def make_known_to_torch() -> None:
    """Register our backend and `mpi://`. torch does that itself where mpistrat is installed, but not for a checkout."""
    import mpistrat_torch

    mpistrat_torch.register()


def make_default_group() -> None:
    """Collective over the ranks of `next_group.comm`."""
    import torch.distributed as dist

    make_known_to_torch()
    dist.init_process_group("mpistrat", init_method="mpi://")


def _known() -> _Known:
    """Not collective."""
    if not has_default_group():
        return _NO_GROUP
    import torch.distributed as dist

    identity = ""
    with contextlib.suppress(Exception):  # a store that keeps nothing, as of torch's own MPI
        store = dist.distributed_c10d._get_default_store()
        identity = store.compare_set(_KEY, "", os.urandom(16).hex()).decode()
    return _Known(dist.get_rank(), dist.get_world_size(), identity)


def _difference(groups: Sequence[_Known]) -> str:
    """In what the default groups that the ranks of a strategy are in are not one over these ranks; "" if they are.

    Args: groups: by rank of the strategy.
    """
    size = len(groups)
    wrong = [
        f"rank {rank} of the strategy is "
        + (f"rank {known.rank} of {known.size} in it" if known.size else "in none")
        for rank, known in enumerate(groups)
        if (known.rank, known.size) != (rank, size)
    ]
    if wrong:
        return ", ".join(wrong[:8]) + (", …" if len(wrong) > 8 else "")
    identities = {known.identity for known in groups}
    return f"the ranks are in {len(identities)} different groups" if len(identities) > 1 else ""
