"""The functions that torch calls to make a group of the backend "mpistrat", and for `init_method="mpi://"`.

`mpistrat_torch` registers both, by torch's entry point, before this file is imported.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.torch_store import opener_of_store
from mpistrat.machine.devices import nccl_that_outlives_errors
from mpistrat.torch_distributed.native import NativeGroups
from mpistrat.torch_distributed.process_group import MpistratProcessGroup
from mpistrat.torch_distributed.rendezvous import base
from mpistrat.torch_distributed.tracing import trace_ranges
from mpistrat.trace import spans


def create(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    """Return a new process group of the backend "mpistrat". Collective over the group's ranks.

    Called by: torch's `init_process_group` and `new_group`.
    Args:
        options: torch's `_DistributedBackendOptions`: store, rank, ranks, timeout and name of the group.
        backend_options: ignored.
    Raises: RuntimeError if the default group is to have another number of ranks than MPI has.
    """
    rank = options.group_rank
    size = options.group_size
    ranks = list(options.global_ranks_in_group)
    native = NativeGroups(options.store, rank, size, options.timeout, options.group_id)
    here = base()
    if not ranks and size != here.size:
        raise RuntimeError(
            f"rank {rank}: init_process_group was called for {size} ranks, but MPI has {here.size} here. Start the "
            "program with mpirun or srun, and leave out rank= and world_size=, or set them to those of MPI"
        )
    communicator: Communicator = LocalCommunicator()
    messages, give_back = None, lambda: None
    if here.pools is not None:
        pool, used = here.pools.take(rank, ranks, options.timeout)
        communicator = used.collectives
        messages = used.messages
        give_back = functools.partial(pool.give_back, used)
        watch = communicator.contract.watch
        if watch is not None and watch.revocable_group is not None:
            # The program may go on without a lost rank.
            native.while_made = nccl_that_outlives_errors
            watch.revocable_group.before_telling(native.abort)
    if not ranks:
        trace_ranges(communicator)
        spans.current.begin_steps()
    group = MpistratProcessGroup(
        communicator, messages, native, options.group_id, give_back, here.cpu_share
    )
    group.options.global_ranks_in_group = ranks
    group.set_timeout(options.timeout)
    return group


def rendezvous(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[c10d.Store, int, int]]:
    """Yield once: a new store over MPI's ranks, this process's rank, and the number of ranks. Collective.

    Called by: torch's `init_process_group`, for `init_method="mpi://"`.
    Args:
        url: ignored.
        timeout: how long to wait for the other ranks, a `datetime.timedelta`; None for the settings' limit.
    """
    here = base()
    pools = here.pools
    with pools.meeting(timeout, "init_process_group") if pools else contextlib.nullcontext():
        store = opener_of_store(here)()
    yield store, here.rank, here.size
