"""Over which ranks the default group is made, and the store by which they meet: both from MPI."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import math
import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.liveness import observation
from mpistrat.machine.addresses import Answering, listen, own_addresses, reached
from mpistrat.machine.cpu_share import cpu_share
from mpistrat.topology import Topology
from mpistrat.torch_distributed import default_group

if TYPE_CHECKING:
    from mpistrat.torch_distributed.communicator_pool import CommunicatorPools


LOOPBACK = "127.0.0.1"
TIMEOUT = datetime.timedelta(minutes=5)  # of who connects to a store


class Base:
    """The ranks of the default group.

    Attributes:
        topology: of the ranks.
        pools: the communicators of groups; None for one rank without MPI.
        cpu_share: the CPUs that this rank has, those that it shares with others in part.
    """

    def __init__(self, comm: Any) -> None:
        resolver = MPIClusterResolver(comm)
        self.comm = resolver.comm
        self.topology: Topology = resolver.topology()
        self.rank, self.size = self.topology.rank, self.topology.size
        self.pools: CommunicatorPools | None = None
        self.cpu_share = math.inf
        if self.comm is not None:
            mine = os.sched_getaffinity(0)
            masks = self.comm.allgather(mine)
            here = self.topology.ranks_on_node(self.topology.node)
            self.cpu_share = float(cpu_share(mine, [masks[rank] for rank in here]))
            from mpistrat.torch_distributed.communicator_pool import CommunicatorPools

            self.pools = CommunicatorPools(self.comm)

    @functools.cached_property
    def address(self) -> str:
        """Of rank 0's node, as all ranks reach it. Collective over the ranks when it is read first."""
        return LOOPBACK if self.topology.num_nodes == 1 else address_that_all_reach(self)


_base: Base | None = None


def base() -> Base:
    """The ranks of the default group of this backend, else of the next one: see `default_group.ranks`.

    Collective over them when they are not those of the last one.
    """
    global _base
    if _base is None or not default_group.has_default_group("mpistrat"):
        comm = MPIClusterResolver(default_group.ranks()).comm
        if _base is None or _base.comm is not comm:
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
    """A store on a port that the system picks, at an address of rank 0 that all nodes reach. Collective."""
    address, size = base.address, base.size
    if base.rank == 0:
        listener = listen(address)
        base.comm.bcast(listener.getsockname()[1])
        return _store_at(listener, size)
    return c10d.TCPStore(
        address, base.comm.bcast(None), size, False, TIMEOUT, wait_for_workers=False
    )


class _AgentStore:
    """Listens, and becomes a store once somebody connects.

    Not before, for torch looks up the name of an address that it connects to, as each store does to itself, and waits
    5 s for a name server that does not answer.
    """

    def __init__(self, listener: socket.socket, size: int) -> None:
        self._listener, self._size = listener, size
        self._is_asked = False
        self._thread = threading.Thread(target=self._serve, name="mpistrat store", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _serve(self) -> None:
        select.select([self._listener], [], [])
        self._is_asked = True
        self._store = _store_at(self._listener, self._size)

    def _end(self) -> None:
        if self._is_asked:  # Python must not end while its thread is in torch
            self._thread.join()


def start_agent_store(base: Base) -> tuple[str, int]:
    """The address and port of a store for whoever asks for MASTER_ADDR and MASTER_PORT. Collective over the ranks."""
    address, port = base.address, 0
    if base.rank == 0:
        listener = listen(address)
        port = listener.getsockname()[1]
        _AgentStore(listener, base.size)
    if base.comm is not None:
        port = base.comm.bcast(port)
    return address, port


def _store_at(listener: socket.socket, size: int) -> c10d.TCPStore:
    address, port = listener.getsockname()[:2]
    return c10d.TCPStore(
        address,
        port,
        size,
        True,
        TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def address_that_all_reach(base: Base) -> str:
    """The first address of rank 0's node that all other nodes reach. Collective over the ranks.

    Raises: RuntimeError on all ranks when there is none.
    """
    comm, topology = base.comm, base.topology
    with Answering() if base.rank == 0 else contextlib.nullcontext() as answering:
        # The last one is reached where MPI takes one machine for several nodes.
        offer = answering and ((*own_addresses(), LOOPBACK), answering.port, answering.token)
        addresses, port, token = comm.bcast(offer)
        tries = topology.node > 0 and topology.local_rank == 0
        answers = comm.allgather(reached(addresses, port, token) if tries else None)
    missed: dict[str, list[str]] = {address: [] for address in addresses}
    for rank, answer in enumerate(answers):
        for address, has_reached in zip(addresses, answer or (), strict=answer is not None):
            if not has_reached:
                missed[address].append(topology.hosts[topology.node_of_rank[rank]])
    for address in addresses:
        if not missed[address]:
            return str(address)
    tried = "".join(
        f"\n  {address} is not reached from {', '.join(hosts[:8])}{', …' * (len(hosts) > 8)}"
        for address, hosts in missed.items()
    )
    raise RuntimeError(
        f"rank {base.rank}: the nodes of this job cannot connect to that of rank 0 ({topology.hosts[0]}), which holds "
        f"the store of torch.distributed. Its addresses:{tried}\n"
        "Nodes must be able to open TCP connections to each other, on ports that the system picks: is there a firewall?"
    )
