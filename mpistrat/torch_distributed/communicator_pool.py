"""The communicators of process groups. A group that is destroyed leaves its own to the next over the same ranks.

Freeing a communicator is collective, and `destroy_process_group` is not: a rank may call it late, or never. So a
communicator is kept, and used again once all of its ranks have given it back; MPICH ends after 2,046 of them.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpi4py import MPI

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.construction import new_communicator
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.liveness.start_deadline import start_deadline

_LARGEST_TAG = 32767  # that every MPI has


@dataclass(eq=False)
class GroupCommunicators:
    """What one process group at a time uses.

    Attributes:
        number: among those of the same ranks; equal on all of them.
        collectives: for its collectives.
        messages: for its messages.
    """

    number: int
    collectives: Communicator
    messages: MPI.Intracomm


@dataclass(eq=False)
class _Pool:
    """Of all groups with the same ranks in the same order."""

    comm: MPI.Intracomm
    made: int = 0
    free: dict[int, GroupCommunicators] = field(default_factory=dict)

    def take(self) -> GroupCommunicators:
        """Collective over the ranks."""
        usable = {n for n, each in self.free.items() if not each.collectives.contract.is_abandoned}
        common = set.intersection(*self.comm.allgather(usable))
        if common:
            return self.free.pop(min(common))
        self.made += 1
        collectives = LocalCommunicator() if self.comm.size == 1 else None
        return GroupCommunicators(
            self.made, collectives or new_communicator(self.comm.Dup()), self.comm.Dup()
        )

    def give_back(self, used: GroupCommunicators) -> None:
        """Not collective."""
        self.free[used.number] = used


class CommunicatorPools:
    """All groups of a program, whose default group is over the ranks of `comm`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._private = comm.Dup()
        self._pools: dict[tuple[int, ...], _Pool] = {}
        self._world = tuple(range(comm.size))  # by rank of the default group: the rank in `comm`

    def take(self, rank: int, ranks: Sequence[int]) -> tuple[_Pool, GroupCommunicators]:
        """What a group uses; collective over its ranks.

        Args:
            rank: this process's in the group.
            ranks: those of the default group that are in it, in its order; none: it is the default group.
        """
        with start_deadline("init_process_group or new_group", rank=rank, size=len(ranks) or None):
            if not ranks:
                order = self._private.allgather(rank)
                self._world = tuple(sorted(range(len(order)), key=order.__getitem__))
                if sorted(order) != list(range(len(order))):
                    raise ValueError(
                        f"init_process_group got rank= {order}, by rank of MPI, but each rank must have its own"
                    )
            members = tuple(self._world[each] for each in ranks or range(self.comm.size))
            pool = self._pools.get(members)
            if pool is None:
                pool = self._pools[members] = _Pool(self._comm_of(members))
            return pool, pool.take()

    def _comm_of(self, members: tuple[int, ...]) -> MPI.Intracomm:
        everybody = self._private.Get_group()
        group = everybody.Incl(members)
        tag = zlib.crc32(repr(members).encode()) % _LARGEST_TAG
        comm = self._private.Create_group(group, tag)
        group.Free()
        everybody.Free()
        return comm
