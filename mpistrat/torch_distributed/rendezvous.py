"""Over which ranks the default group is made, and the store by which they meet: both from MPI."""

from __future__ import annotations

import datetime
import os
import socket
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.liveness import observation
from mpistrat.topology import Topology

if TYPE_CHECKING:
    from mpistrat.torch_distributed.communicator_pool import CommunicatorPools


class Base:
    """The ranks of the default group.

    Attributes:
        topology: of the ranks.
        pools: the communicators of groups; None for one rank without MPI.
    """

    def __init__(self, comm: Any) -> None:
        resolver = MPIClusterResolver(comm)
        self.comm = resolver.comm
        self.topology: Topology = resolver.topology()
        self.rank, self.size = self.topology.rank, self.topology.size
        self.pools: CommunicatorPools | None = None
        if self.comm is not None:
            from mpistrat.torch_distributed.communicator_pool import CommunicatorPools

            self.pools = CommunicatorPools(self.comm)


_base: Base | None = None


def base() -> Base:
    """The ranks of the default group: all of the job, unless `make_base` has named others.

    Collective when it is called first.
    """
    return make_base(None) if _base is None else _base


def make_base(comm: Any) -> Base:
    """From now on the default group is over the ranks of `comm`; None: all of the job. Collective over them."""
    global _base
    if _base is None or (comm is not None and comm is not _base.comm):
        _base = Base(comm)
    return _base


_stores = 0  # that this process has made; all ranks make the same ones


def store_of(base: Base) -> c10d.Store:
    """A new store for the ranks. Collective over them."""
    global _stores
    _stores += 1
    if base.comm is None or base.size == 1:
        return c10d.HashStore()
    path = base.comm.bcast(_new_file()) if base.topology.num_nodes == 1 else ""
    seen = bool(path) and os.path.isdir(os.path.dirname(path))  # not from another container
    if all(base.comm.allgather(seen)):
        return c10d.FileStore(path, base.size)
    return tcp_store(base)


def _new_file() -> str:
    """A file for a store in the job's folder, which is removed with the job; "" where it has none."""
    observed = observation.observed()
    return os.path.join(observed.folder.path, f"store-{_stores}") if observed else ""


def tcp_store(base: Base) -> c10d.TCPStore:
    """A store on a port that the system picks, at an address of rank 0 that all nodes reach."""
    comm, timeout = base.comm, datetime.timedelta(minutes=5)
    server = port = None
    if base.rank == 0:
        server = c10d.TCPStore("localhost", 0, base.size, True, timeout, wait_for_workers=False)
        port = server.port
    host, port = comm.bcast((socket.gethostname(), port))
    return server or c10d.TCPStore(host, port, base.size, False, timeout, wait_for_workers=False)
