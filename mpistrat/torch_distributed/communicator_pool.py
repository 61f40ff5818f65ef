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
from mpistrat.torch_distributed.messages import Messages, Traffic

_LARGEST_TAG = 32767  # that every MPI has


@dataclass(eq=False)
class GroupCommunicators:
    """What one process group at a time uses.

    Attributes:
        number: among those of the same ranks; equal on all of them.
        collectives: for its collectives.
        messages: for its messages; None where there are no others.
    """

    number: int
    collectives: Communicator
    messages: Messages | None = None

    @property
    def traffic(self) -> Traffic | None:
        """Of messages; None: another group cannot use this, as calls of the last one are under way."""
        if self.messages is None or self.collectives.contract.is_abandoned:
            return None
        return self.messages.traffic


@dataclass(eq=False)
class _Pool:
    """Of all groups with the same ranks in the same order."""

    comm: MPI.Intracomm
    made: int = 0
    free: dict[int, GroupCommunicators] = field(default_factory=dict)

    def take(self) -> GroupCommunicators:
        """Collective over the ranks."""
        if self.comm.size == 1:
            return GroupCommunicators(0, LocalCommunicator())
        everyone = self.comm.allgather({n: used.traffic for n, used in self.free.items()})
        for number in sorted(set.intersection(*map(set, everyone))):
            if _is_at_rest([each[number] for each in everyone]):
                return self.free.pop(number)
        self.made += 1
        collectives = new_communicator(self.comm.Dup())
        messages = Messages(self.comm.Dup(), collectives.contract.watch)  # type: ignore[arg-type]
        return GroupCommunicators(self.made, collectives, messages)

    def give_back(self, used: GroupCommunicators) -> None:
        """Not collective."""
        self.free[used.number] = used


def _is_at_rest(everyone: Sequence[Traffic | None]) -> bool:
    """Whether nothing is under way between the ranks: a message of one group must not reach the next."""
    known = [traffic for traffic in everyone if traffic is not None]
    on_their_way = sum(traffic.sent - traffic.received for traffic in known)
    return len(known) == len(everyone) and not on_their_way


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
