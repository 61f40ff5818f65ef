"""The communicators of process groups. A group that is destroyed leaves its own to the next over the same ranks.

Freeing a communicator is collective, and `destroy_process_group` is not: a rank may call it late, or never. So a
communicator is kept, and used again once all of its ranks have given it back; MPICH ends after 2,046 of them.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from mpistrat.communicators.communicator import Communicator
from mpistrat.communicators.construction import new_communicator
from mpistrat.communicators.contract.call_signature import signature_of
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.liveness.ending.job_end import job_end
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until
from mpistrat.torch_distributed.messages import Messages
from mpistrat.torch_distributed.work import seconds_of

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
    def on_their_way(self) -> int | None:
        """Messages sent less messages received; None: calls of the last group go on, so another cannot use this."""
        if self.messages is None or self.collectives.contract.is_abandoned:
            return None
        return self.messages.on_their_way


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
        free = {n: sent for n, used in self.free.items() if (sent := used.on_their_way) is not None}
        free_on_ranks = self.comm.allgather(free)
        for number in sorted(set.intersection(*map(set, free_on_ranks))):
            # A message of one group must not reach the next.
            if not sum(each[number] for each in free_on_ranks):
                return self.free.pop(number)
        self.made += 1
        collectives = new_communicator(self.comm.Dup())
        messages = Messages(self.comm.Dup(), collectives.contract.watch)  # type: ignore[arg-type]
        return GroupCommunicators(self.made, collectives, messages)

    def give_back(self, used: GroupCommunicators) -> None:
        """Not collective."""
        self.free[used.number] = used


class CommunicatorPools:
    """All groups of a program, whose default group is over the ranks of `comm`. Collective over them."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._private = comm.Dup()
        self._pools: dict[tuple[int, ...], _Pool] = {}
        self._all = self._world = tuple(range(comm.size))  # `_world`: by rank of the default group
        self._numbers = self._private.allgather(MPI.COMM_WORLD.rank)  # in the job
        mpi, name = MpiTransport(self._private), self._private.bcast(uuid.uuid4().hex)
        watch = job_end().records.watch_of(self._private, name)
        # Of meetings, by the members.
        self._contracts = {self._all: Contract(mpi, name, watch, "never")}
        job_end().watch(self._contracts[self._all], self._private)

    def take(
        self, rank: int, ranks: Sequence[int], timeout: Any
    ) -> tuple[_Pool, GroupCommunicators]:
        """What a group uses; collective over its ranks.

        Args:
            rank: this process's in the group.
            ranks: those of the default group that are in it, in its order; none: it is the default group.
            timeout: of the group, as of `meeting`.
        """
        members = tuple(self._world[each] for each in ranks)
        with self.meeting(timeout, "new_group" if ranks else "init_process_group", members):
            if not ranks:
                order = self._private.allgather(rank)
                if sorted(order) != list(range(len(order))):
                    raise ValueError(
                        f"init_process_group got rank= {order}, by rank of MPI, but each rank must have its own"
                    )
                members = self._world = tuple(sorted(range(len(order)), key=order.__getitem__))
            pool = self._pools.get(members)
            if pool is None:
                pool = self._pools[members] = _Pool(self._comm_of(members))
            return pool, pool.take()

    @contextlib.contextmanager
    def meeting(self, timeout: Any, call: str, members: tuple[int, ...] = ()) -> Iterator[None]:
        """Collective over `members`. The block begins when all have come; it is recorded as a collective is, so that
        the observer reports a member that does not come.

        Args:
            timeout: a `datetime.timedelta`. Ranks that have waited so long raise StallError. None: the settings' limit.
            call: the program's call, for the report.
            members: their ranks in `comm`; none: all.
        """
        contract = self._contract_of(members if 0 < len(members) < self.comm.size else self._all)
        signature = signature_of((call, str(list(members)) if members else ""))
        with contract.watch.waiting(seconds_of(timeout)), contract.enter(signature):
            _come_together(self._private, members or self._all, contract.watch)
            yield

    def _contract_of(self, members: tuple[int, ...]) -> Contract:
        """The record of meetings of `members`, who may have no communicator yet. Not collective."""
        if members not in self._contracts:
            of_all, numbers = self._contracts[self._all], [self._numbers[each] for each in members]
            name = f"{of_all.name}/{members}"
            watch = job_end().records.watch_of_members(of_all.watch, numbers, name)
            self._contracts[members] = of_all.of_part(MpiTransport(self._private), name, watch)
        return self._contracts[members]

    def _comm_of(self, members: tuple[int, ...]) -> MPI.Intracomm:
        ranks = self._private.Get_group()
        group = ranks.Incl(members)
        tag = zlib.crc32(repr(members).encode()) % _LARGEST_TAG
        comm = self._private.Create_group(group, tag)
        group.Free()
        ranks.Free()
        return comm


def _come_together(comm: MPI.Intracomm, members: Sequence[int], watch: CommunicatorWatch) -> None:
    """Return once all `members` have called this.

    Each sends the first member a message. The first member answers when it has all messages.
    """
    steps: list[Callable[..., MPI.Request]] = [comm.Isend, comm.Irecv]
    first, *partners = members
    if comm.rank == first:
        steps.reverse()
    else:
        partners = [first]
    for begin in steps:
        requests = [begin([bytearray(), MPI.BYTE], rank) for rank in partners]
        wait_until(functools.partial(MPI.Request.Testall, requests), watch)
