"""torch's default group beside a strategy: over the same ranks, made by the strategy or by the program.

Every strategy imports this file, so it imports torch only when a group is asked for.
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

# The key in a default group's store with a random identity: ranks with equal identities are in the same group.
_KEY = "mpistrat/default group"

# Whether every strategy makes a default group, also without torch_distributed=True: `mpistrat run` sets it.
with_every_strategy = False


class _Known(NamedTuple):
    """A rank's knowledge of its default group. `identity`: equal on its ranks; empty if its store keeps nothing."""

    rank: int
    size: int
    identity: str


_NO_GROUP = _Known(-1, 0, "")


def share_default_group(what: str, comm: Any, communicator: Communicator) -> None:
    """Make torch's default group over the ranks of a strategy, or check the group that the program has made.

    Called by: every rank of `communicator`, when the strategy is made.
    Args:
        what: the class of the strategy.
        comm: the mpi4py communicator of the same ranks; None for one rank without MPI.
    Raises: RuntimeError on all ranks, if the program's group has other ranks, or in another order.
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
    """Whether a strategy makes a default group unasked: under `mpistrat run`, where there is none yet."""
    return with_every_strategy and not has_default_group()


def move_default_group(comm: Any, *, again: bool) -> None:
    """Let `init_method="mpi://"` mean the ranks of `comm` from now on.

    Args: again: whether to make a default group over them now, in place of an earlier one. Then the call is collective.
    """
    next_group.comm = comm
    if again:
        if has_default_group():
            sys.modules["torch.distributed"].destroy_process_group()
        make_default_group()


def leave_default_group() -> None:
    """Abort all of torch's groups, if there is a default group. Calls on their way are left. Not collective."""
    if has_default_group():
        sys.modules["torch.distributed"].distributed_c10d._abort_process_group()


def make_known_to_torch() -> None:
    """Register our backend and `mpi://`. An installed mpistrat is registered by torch itself, a checkout is not."""
    import mpistrat_torch

    mpistrat_torch.register()


def make_default_group() -> None:
    """Make torch's default group. Collective over the ranks of `next_group.comm`."""
    import torch.distributed as dist

    make_known_to_torch()
    dist.init_process_group("mpistrat", init_method="mpi://")


def _known() -> _Known:
    """Return this rank's knowledge of its default group; `_NO_GROUP` without one. Not collective."""
    if not has_default_group():
        return _NO_GROUP
    import torch.distributed as dist

    identity = ""
    with contextlib.suppress(Exception):  # the store of torch's own MPI backend keeps nothing
        store = dist.distributed_c10d._get_default_store()
        identity = store.compare_set(_KEY, "", os.urandom(16).hex()).decode()
    return _Known(dist.get_rank(), dist.get_world_size(), identity)


def _difference(groups: Sequence[_Known]) -> str:
    """Say how the default groups of a strategy's ranks differ from one group over these ranks in their order.

    Args: groups: each rank's knowledge, by rank of the strategy.
    Returns: a text for the error; empty if there is no difference.
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
