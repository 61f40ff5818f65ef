"""The ranks of torch's default group, from MPI, and a TCP store for programs that ask for MASTER_ADDR."""

from __future__ import annotations

import atexit
import math
import os
import secrets
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.communicators.torch_store import Ranks, store_at
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.machine.addresses import listen
from mpistrat.machine.cpu_share import cpu_share
from mpistrat.torch_distributed import next_group

if TYPE_CHECKING:
    from mpistrat.torch_distributed.communicator_pool import CommunicatorPools


class Base(Ranks):
    """The ranks of the default group, and the communicators for its process groups. The constructor is collective.

    Args: comm: the mpi4py communicator of the ranks; None for one rank without MPI.

    Attributes:
        pools: the communicators of process groups; None for one rank.
        cpu_share: number of CPUs that this rank has. A CPU that ranks share counts in part. Infinity for one rank.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self.pools: CommunicatorPools | None = None
        self.cpu_share = math.inf
        if self.size == 1:
            return
        with start_deadline("the start of torch.distributed", rank=self.rank, size=self.size):
            affinity = os.sched_getaffinity(0)
            masks = self.comm.allgather(affinity)
            here = self.topology.ranks_on_node(self.topology.node)
            self.cpu_share = float(cpu_share(affinity, [masks[rank] for rank in here]))
            from mpistrat.torch_distributed.communicator_pool import CommunicatorPools

            self.pools = CommunicatorPools(self.comm)


_base: Base | None = None


def base() -> Base:
    """Return the ranks of the default group; without one of this backend, the ranks that the next one will have.

    The next default group is over `next_group.comm`. If its ranks are others than in the last call, this call is
    collective over them.
    """
    global _base
    if _base is None or not next_group.asked_name():
        comm = MPIClusterResolver(next_group.comm).comm
        if _base is None or _base.comm is not comm:
            _base = Base(comm)
    return _base


class _AgentStore:
    """A thread that listens at a store's address, and opens torch's TCP store there once a process connects.

    A store that is opened at once would delay each start, because it connects to itself. torch then looks up the name
    of the address, and waits 5 s for a name server that does not answer.
    Args:
        listener: a socket that listens at the address.
        size: number of ranks.
    """

    def __init__(self, listener: socket.socket, size: int) -> None:
        self._listener = listener
        self._size = size
        self._is_asked = False
        self._thread = threading.Thread(target=self._serve, name="mpistrat store", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _serve(self) -> None:
        select.select([self._listener], [], [])
        self._is_asked = True
        self._store = store_at(self._listener, self._size)

    def _end(self) -> None:
        if self._is_asked:  # Python must not end while this thread is in torch
            self._thread.join()


@start_deadline("the start of `mpistrat run`")
def start_agent_store(base: Base) -> tuple[tuple[str, int], str]:
    """Start a store on rank 0, for programs that take its address from MASTER_ADDR and MASTER_PORT. Collective.

    Called by: every rank of `mpistrat run`.
    Returns: (address, port) of the store, and a random text of 16 hexadecimal digits, TORCHELASTIC_RUN_ID; equal on all
        ranks.
    """
    address = base.address
    port = 0
    run_id = secrets.token_hex(8)
    if base.rank == 0:
        listener = listen(address)
        port = listener.getsockname()[1]
        _AgentStore(listener, base.size)
    if base.comm is not None:
        port, run_id = base.comm.bcast((port, run_id))
    return (address, port), run_id
