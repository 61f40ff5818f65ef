"""Messages between the ranks of a communicator that come when they come, whatever the others do meanwhile."""

from __future__ import annotations

import math
import os
import pickle
import select
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from mpistrat.parameter_server.rpc.pipes import PipeInbox, PipeOutbox
from mpistrat.parameter_server.rpc.unpickling import read_message

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.parameter_server.rpc.mpi_messages import MpiMessages

# Where MPI has to be asked: how long to sleep between, as a part of the time waited so far.
_PAUSE = 1 / 32
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3
_SECONDS_BETWEEN_LOOKS = 0.01  # for ranks of other nodes that have died

LOST: Final = "lost"  # comes, as a message of a rank that has died, as its last


class Channel:
    """Messages between the ranks of `comm`: pipes within a node, MPI where memory is not shared.

    Collective to make. Whoever waits sleeps in the kernel while all the others are on its node; else it asks MPI now
    and then, after pauses of up to a millisecond.

    Args:
        comm: used by nobody else.
        outlives_ranks: whether its MPI lets ranks go on when one has died.
        pipes: False leaves all to MPI.
    Attributes:
        rank, size: as of `comm`.
        lost: the ranks that have died, or have ended without a word.
    """

    def __init__(
        self, comm: MPI.Intracomm, *, outlives_ranks: bool = False, pipes: bool = True
    ) -> None:
        from mpi4py import MPI  # here, because it starts MPI

        from mpistrat.parameter_server.rpc.mpi_messages import MpiMessages

        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.lost: set[int] = set()
        self._comm, self._outlives_ranks = comm, outlives_ranks
        self._inbox = PipeInbox()
        self._sending = threading.Lock()  # also around calls of MPI
        self._by_pipe: dict[int, PipeOutbox] = {}
        self._full: dict[int, PipeOutbox] = {}  # by descriptor
        self._deaths: dict[int, int] = {}  # of ranks, by the descriptor that tells
        self._pidfds: dict[int, int] = {}  # by rank
        self._pids: dict[int, int] = {}
        node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
        ranks_of_node = node.allgather(comm.rank) if pipes else [comm.rank]
        node.Free()
        self._poll = select.poll()
        self._poll.register(self._inbox.descriptor, select.POLLIN)
        for peer, address in enumerate(comm.allgather(self._inbox.address)):
            if peer not in ranks_of_node:
                continue
            try:
                self._by_pipe[peer] = PipeOutbox(address, self.rank)
            except OSError:  # a container of its own, or a /proc that shows no other processes
                continue
            self._pids[peer] = address.pid
            if peer != self.rank:
                self._tell_of_death(peer, address.pid)
        reached = comm.allgather(sorted(self._by_pipe))  # and all have opened what they could
        by_mpi = any(self.rank not in peers for peers in reached) or len(self._by_pipe) < self.size
        self._mpi: MpiMessages | None = MpiMessages(comm) if by_mpi else None
        self._looked = 0.0

    def _tell_of_death(self, peer: int, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # before Linux 5.3: the launcher ends the job
            return
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._deaths[descriptor], self._pidfds[peer] = peer, descriptor
        self._poll.register(descriptor, select.POLLIN)

    def has_died(self, rank: int) -> bool:
        """Whether it is known to have died, or can be seen to; nothing is read. Called by: any thread."""
        if rank in self.lost or rank not in self._pidfds:
            return rank in self.lost
        poll = select.poll()  # a new one: only one thread at a time may use it
        poll.register(self._pidfds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def has_lost(self) -> bool:
        """Whether any has. Called by: any thread."""
        return any(self.has_died(rank) for rank in range(self.size))

    def pid_of(self, rank: int) -> int | None:
        """The process id here; None where no memory is shared."""
        return self._pids.get(rank)

    def shares_memory_with(self, rank: int) -> bool:
        """Whether the two can open each other's files."""
        return rank in self._by_pipe

    def send(self, to: int, message: Any) -> None:
        """Send anything that can be pickled; nobody waits for the receiver. Called by: any thread.

        What finds no room in the receiver's pipe goes out while somebody here receives. Ranks that have died get
        nothing.
        """
        with self._sending:
            pipe = self._by_pipe.get(to)
            if to in self.lost:
                return
            if pipe is not None:
                if not pipe.put(pickle.dumps(message, protocol=5)):
                    self._full[pipe.descriptor] = pipe
                    self._poll.register(pipe.descriptor, select.POLLOUT)
                    self._by_pipe[self.rank].put(b"")  # a thread that waits already does not see it
            else:
                assert self._mpi is not None
                self._mpi.put(to, message)

    def unsent(self, to: Sequence[int]) -> list[int]:
        """Which of these ranks live, and what was sent to them is not yet all under way. Called by: any thread."""
        with self._sending:
            return [rank for rank in to if rank not in self.lost and self._is_unsent(rank)]

    def _is_unsent(self, rank: int) -> bool:
        pipe = self._by_pipe.get(rank)
        if pipe is not None:
            return pipe.descriptor in self._full
        assert self._mpi is not None
        return self._mpi.is_sending(rank)

    def wake(self) -> None:
        """Let a `receive` that waits return. Called by: any thread."""
        with self._sending:
            self._by_pipe[self.rank].put(b"")

    def receive(self, seconds: float | None = None) -> list[tuple[int, Any]]:
        """What has come since, with who sent it; waits for something. Called by: one thread at a time.

        Args: seconds: how long to wait at most; None waits on.
        Returns: messages, by sender in the order of sending; LOST is a dead rank's last one, though it may have sent
            more. [] after a `wake`, when what was sent has gone, when the time is over, and at times for no reason.
        """
        begin = time.monotonic()
        end = None if seconds is None else begin + seconds
        while True:
            now = time.monotonic()
            left = None if end is None else max(0.0, end - now)
            pause = left
            if self._mpi is not None:
                wished = min(max((now - begin) * _PAUSE, _SHORTEST_PAUSE), _LONGEST_PAUSE)
                pause = wished if left is None else min(left, wished)
            found, woken = self._look(0 if self._mpi is not None else pause)
            if found or woken or (left is not None and left <= 0):
                return found
            if self._mpi is not None and pause:
                time.sleep(pause)

    def _look(self, seconds: float | None) -> tuple[list[tuple[int, Any]], bool]:
        """What there is; waits so long for a pipe.

        Returns: also whether to come back: somebody called `wake`, or what was sent has gone.
        """
        ready = self._poll.poll(None if seconds is None else math.ceil(seconds * 1000))
        found: list[tuple[int, Any]] = []
        woken = False
        for sender, data in self._inbox.read():
            if data:
                found.append((sender, read_message(data)))
            else:
                woken = True
        dead: list[int] = []
        for descriptor, _ in ready:
            if descriptor in self._deaths:
                dead.append(self._deaths.pop(descriptor))
                self._poll.unregister(descriptor)
        if dead:  # it may have written after the pipe was read, and before it died
            late = self._inbox.read(everything=True)
            found += [(sender, read_message(data)) for sender, data in late if data]
        with self._sending:
            for descriptor in [one for one, _ in ready if one in self._full]:
                if self._full[descriptor].flush():
                    self._poll.unregister(descriptor)
                    del self._full[descriptor]
                    woken = True
            if self._mpi is not None:
                found += list(self._mpi.read())
                woken |= self._mpi.flush()
                now = time.monotonic()
                if self._outlives_ranks and now - self._looked > _SECONDS_BETWEEN_LOOKS:
                    self._looked = now
                    dead += [rank for rank in self._mpi.failed_ranks() if rank not in dead]
            if self.lost:  # what the dead have sent may still come
                found = [(sender, message) for sender, message in found if sender not in self.lost]
            for rank in dead:
                if rank not in self.lost:
                    self.lost.add(rank)
                    found.append((rank, LOST))
                    self._inbox.forget(rank)
                    if self._mpi is not None:
                        self._mpi.forget(rank)
        return found, woken
