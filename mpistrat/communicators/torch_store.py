"""Stores of torch.distributed: with their help the ranks of a group find each other.

Ranks of one node use a file, ranks of several nodes a TCP port.

This file imports torch at its top, so other files import it only when torch is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.liveness import deadlines
from mpistrat.liveness.observer import observation
from mpistrat.machine.addresses import Answering, listen, own_addresses, reached
from mpistrat.topology import Topology

LOOPBACK = "127.0.0.1"
# For a rank that connects to a store.
TIMEOUT = datetime.timedelta(seconds=deadlines.RANK_WAITS_FOR_STORE)
# Levels of torch's C++ log.
WARNING = 1
ERROR = 2


class Ranks:
    """The ranks of a communicator and their nodes: the members of a torch store (torch.distributed's key-value server).

    Attributes:
        comm: the communicator of mpi4py; None for one rank without MPI.
        topology: the number of nodes, and each rank's node.
        rank: this rank's number.
        size: number of ranks.
    """

    def __init__(self, comm: Any) -> None:
        resolver = MPIClusterResolver(comm)
        self.comm = resolver.comm
        self.topology: Topology = resolver.topology()
        self.rank = self.topology.rank
        self.size = self.topology.size

    @functools.cached_property
    def address(self) -> str:
        """The address of rank 0's node that all ranks reach; the loopback address on one node.

        On several nodes, all ranks must read it together the first time, because that is collective.
        """
        if self.topology.num_nodes == 1:
            return LOOPBACK
        return address_that_all_reach(self)


def opener_of_store(ranks: Ranks) -> Callable[[], c10d.Store]:
    """Return a function that opens a new store of `ranks`. Collective over the ranks, by MPI.

    Called by: the torch.distributed backend, and the transports that start an accelerator's library.

    Returns: a function of no arguments, without MPI. It opens a HashStore for one rank; a FileStore if all
        ranks are on one node and see the job's folder; else a TCPStore that rank 0 serves.

    Raises: RuntimeError on all ranks if the nodes cannot connect to rank 0's node.
    """
    if ranks.comm is None or ranks.size == 1:
        return c10d.HashStore
    path = ""
    if ranks.topology.num_nodes == 1:
        path = ranks.comm.bcast(_new_file())
    seen = os.path.isdir(os.path.dirname(path))  # False in another container
    if all(ranks.comm.allgather(seen)):
        return lambda: c10d.FileStore(path, ranks.size)
    address = ranks.address
    if ranks.rank == 0:
        listener = listen(address)
        ranks.comm.bcast(listener.getsockname()[1])
        return lambda: store_at(listener, ranks.size)
    port = ranks.comm.bcast(None)
    return lambda: _tcp_store(address, port, ranks.size, False, None)


def _new_file() -> str:
    """Return a new random path for a store's file in the job's folder. The folder is removed when the job ends.

    Returns: "" if the job has no such folder.
    """
    name = f"store-{os.urandom(8).hex()}"
    if observation.current is None:
        return ""
    return os.path.join(observation.current.folder.path, name)


def store_at(listener: socket.socket, size: int) -> c10d.TCPStore:
    """Open the store that rank 0 serves for `size` ranks, at the address and port of the socket `listener`."""
    address, port = listener.getsockname()[:2]
    return _tcp_store(address, port, size, True, listener.detach())


def _tcp_store(address: str, port: int, size: int, hosts: bool, fd: int | None) -> c10d.TCPStore:
    """Open a TCPStore, without torch's warnings about addresses that no name server knows, because it needs no names.

    Meanwhile torch's C++ log writes errors only, unless the user has chosen its level.

    Args:
        address, port: of rank 0's node.
        size: number of ranks.
        hosts: whether this rank serves the store.
        fd: the descriptor of the listening socket; None on ranks that connect.
    """
    level = level_of_log()
    before = level.value
    level.value = {WARNING: ERROR}.get(before, before)
    try:
        return c10d.TCPStore(address, port, size, hosts, TIMEOUT, False, master_listen_fd=fd)
    finally:
        if before == WARNING:  # else another thread opens a store, or the user chose a level
            level.value = before


def level_of_log() -> ctypes.c_int:
    """Return the variable in torch's C++ library that holds the lowest level that the C++ log writes.

    Returns: torch's own variable: the caller sets its `value` to change the log. If this torch does not export it, a
        new variable, so that setting it has no effect.
    """
    with contextlib.suppress(OSError, ValueError):
        library = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    return ctypes.c_int()


def address_that_all_reach(ranks: Ranks) -> str:
    """Return the first address of rank 0's node that a rank of each other node can reach. Collective.

    Raises: RuntimeError on all ranks if there is no such address.
    """
    comm = ranks.comm
    topology = ranks.topology
    with Answering() if ranks.rank == 0 else contextlib.nullcontext() as answering:
        # LOOPBACK is reached where MPI takes one machine for several nodes.
        offer = None
        if answering is not None:
            own = (*own_addresses(), LOOPBACK)
            offer = own, answering.port, answering.token
        addresses, port, token = comm.bcast(offer)
        tries = topology.node > 0 and topology.local_rank == 0
        answer = reached(addresses, port, token) if tries else None
        answers = comm.allgather(answer)
    tried = ""
    for i, address in enumerate(addresses):
        missed = [rank for rank, reaches in enumerate(answers) if reaches and not reaches[i]]
        if not missed:
            return str(address)
        nodes = [topology.node_of_rank[rank] for rank in missed[:8]]
        listed = ", ".join(topology.hosts[node] for node in nodes)
        if len(missed) > 8:
            listed += ", …"
        tried += f"\n  {address} is not reached from {listed}"
    raise RuntimeError(
        f"rank {ranks.rank}: the nodes of this job cannot connect to that of rank 0 ({topology.hosts[0]}), which holds "
        f"the store of torch.distributed.\nIts addresses:{tried}\n"
        "Let the nodes open TCP connections to each other, on ports that the system picks: look for a firewall"
    )
