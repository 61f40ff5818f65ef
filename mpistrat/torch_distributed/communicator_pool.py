"""The communicators of process groups. A destroyed group's communicators serve the next group over the same ranks.

Freeing a communicator is collective, but `destroy_process_group` is not: a rank may call it late, or never. So a
communicator is kept, and used again once all of its ranks have given it back. MPICH fails after 2,046 communicators.

This file imports mpi4py at its top, and is imported itself only on first use, so that `import mpistrat` starts no MPI.
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

_LARGEST_TAG = 32767  # every MPI allows tags up to this one


@dataclass(eq=False)
class GroupCommunicators:
    """The two communicators of a process group: for collectives and for messages. Later groups use them again.

    Attributes:
        number: the number of this pair among the pairs over the same ranks; equal on all of them, from 1. 0 for a group
            of one rank.
        collectives: the communicator for the group's collectives.
        messages: the group's point-to-point messages, with a communicator of their own; None for a group of one rank.
    """

    number: int
    collectives: Communicator
    messages: Messages | None = None

    @property
    def on_their_way(self) -> int | None:
        """Number of messages sent less number received on this rank; over all ranks the sum is 0 if all have arrived.

        None if another group cannot use these communicators: the group has one rank, or calls of the last group go on.
        """
        if self.messages is None or self.collectives.contract.is_abandoned:
            return None
        return self.messages.on_their_way


@dataclass(eq=False)
class _Pool:
    """The communicators of all groups with the same ranks in the same order.

    Attributes:
        comm: the MPI communicator of these ranks. All others are its duplicates.
        made: number of `GroupCommunicators` that were made so far.
        free: the `GroupCommunicators` that this rank has given back, by number.
    """

    comm: MPI.Intracomm
    made: int = 0
    free: dict[int, GroupCommunicators] = field(default_factory=dict)

    def take(self) -> GroupCommunicators:
        """Return communicators that all ranks have given back and that have no messages under way; else new ones.

        Collective over the ranks of `comm`. A group of one rank gets a `LocalCommunicator`, without messages.
        """
        if self.comm.size == 1:
            return GroupCommunicators(0, LocalCommunicator())
        free = {}
        for number, used in self.free.items():
            on_their_way = used.on_their_way
            if on_their_way is not None:
                free[number] = on_their_way
        free_on_ranks = self.comm.allgather(free)
        for number in sorted(set(free).intersection(*free_on_ranks)):
            # A sum other than 0 shows messages that were sent and not received. They must not reach the next group.
            if not sum(each[number] for each in free_on_ranks):
                return self.free.pop(number)
        self.made += 1
        collectives = new_communicator(self.comm.Dup())
        messages = Messages(self.comm.Dup(), collectives.contract.watch)  # type: ignore[arg-type]
        return GroupCommunicators(self.made, collectives, messages)

    def give_back(self, used: GroupCommunicators) -> None:
        """Mark `used` as free on this rank. Not collective."""
        self.free[used.number] = used


class CommunicatorPools:
    """Lends communicators to the process groups of a program, and keeps a pool of them for each sequence of ranks.

    The constructor is collective over the ranks of `comm`.
    Args: comm: the MPI communicator of the default group's ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._private = comm.Dup()
        self._pools: dict[tuple[int, ...], _Pool] = {}
        # `_world`: ranks in `comm`, by rank of the default group.
        self._all = self._world = tuple(range(comm.size))
        self._numbers = self._private.allgather(MPI.COMM_WORLD.rank)  # ranks in the job
        mpi = MpiTransport(self._private)
        name = self._private.bcast(uuid.uuid4().hex)
        watch = job_end().records.watch_of(self._private, name)
        # The contracts (they record calls and waits) for `meeting`, by the ranks in `comm` that wait for each other.
        self._contracts = {self._all: Contract(mpi, name, watch, "never")}
        job_end().watch(self._contracts[self._all], self._private)

    def take(
        self, rank: int, ranks: Sequence[int], timeout: Any
    ) -> tuple[_Pool, GroupCommunicators]:
        """Take communicators for a new group, free ones or new ones. Collective over the group's ranks.

        Args:
            rank: this process's rank in the group.
            ranks: the group's ranks, numbered as in the default group, in order; empty for the default group itself.
            timeout: how long to wait for the other ranks, a `datetime.timedelta`; None for the settings' limit.
        Returns: the pool to give the communicators back to, and the communicators.
        Raises: ValueError if two ranks of the default group have the same `rank`; StallError after `timeout`.
        """
        members = tuple(self._world[each] for each in ranks)
        with self.meeting(timeout, "new_group" if ranks else "init_process_group", members):
            if not ranks:
                order = self._private.allgather(rank)
                if sorted(order) != list(range(len(order))):
                    raise ValueError(
                        f"init_process_group got rank= {order}, by rank of MPI, but each rank must have its own"
                    )
                by_rank = sorted(range(len(order)), key=order.__getitem__)
                members = self._world = tuple(by_rank)
            pool = self._pools.get(members)
            if pool is None:
                pool = self._pools[members] = _Pool(self._comm_of(members))
            return pool, pool.take()

    @contextlib.contextmanager
    def meeting(self, timeout: Any, call: str, members: tuple[int, ...] = ()) -> Iterator[None]:
        """Wait until all members have entered this context, then run the block. Collective over `members`.

        The wait is recorded like a collective. So the observer, a process that watches the node's ranks, reports a
        member that does not come.
        Args:
            timeout: how long to wait, a `datetime.timedelta`; None for the settings' limit.
            call: the name of the program's call, for the report.
            members: ranks in `comm`; empty for all.
        Raises: StallError on a rank that has waited longer than `timeout`.
        """
        recorded = self._all
        if 0 < len(members) < self.comm.size:
            recorded = members
        contract = self._contract_of(recorded)
        listed = str(list(members)) if members else ""
        signature = signature_of((call, listed))
        with contract.watch.waiting(seconds_of(timeout)), contract.enter(signature):
            _come_together(self._private, members or self._all, contract.watch)
            yield

    def _contract_of(self, members: tuple[int, ...]) -> Contract:
        """Return the contract (an object that checks calls) that records the waits of `members` for each other.

        Each rank makes it at the first call for these members, and keeps it. Not collective: no communicator of the
        members is needed.
        Args: members: ranks in `self.comm`; neither numbers of MPI.COMM_WORLD nor torch's ranks.
        """
        if members not in self._contracts:
            of_all = self._contracts[self._all]
            numbers = [self._numbers[each] for each in members]
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
    """Wait until all `members` have called this.

    Each member sends the first member an empty message. The first member answers when it has all messages.
    Args:
        members: ranks in `comm`.
        watch: this rank's record in shared memory, where other ranks see the wait. It raises StallError.
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
