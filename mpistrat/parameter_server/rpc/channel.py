"""Messages between the ranks of a communicator: through pipes within a node, through MPI between nodes."""

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

if TYPE_CHECKING:
    from mpi4py import MPI

# `receive` asks MPI again and again. In between it sleeps for this fraction of the time that it has waited so far.
_PAUSE = 1 / 32
_SHORTEST_PAUSE = 50e-6
_LONGEST_PAUSE = 1e-3
_SECONDS_BETWEEN_LOOKS = 0.01  # between questions to MPI about dead ranks of other nodes

LOST: Final = "lost"  # `receive` gives this message once for a rank that has died


class Unreadable:
    """Takes the place of a message that cannot be unpickled. Attributes: error: the error of unpickling."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def read_message(data: bytes | bytearray, buffers: Sequence[Any] = ()) -> Any:
    """Unpickle a message. Returns: the message; an `Unreadable` with the error if that fails. Raises nothing."""
    try:
        return pickle.loads(data, buffers=buffers)
    except Exception as error:
        return Unreadable(error)


class Channel:
    """Messages between the ranks of `comm`. Collective: all ranks construct it together.

    A rank that waits sleeps in the kernel if pipes reach all ranks; otherwise it asks MPI at least every millisecond.

    Args:
        comm: a communicator that only this channel uses.
        outlives_ranks: whether MPI is fault tolerant, so that the living ranks continue when a rank has died.
        pipes: False sends everything through MPI.
    Attributes:
        rank, size: this rank, and the number of ranks, in `comm`.
        lost: the ranks that `receive` has found dead. A process that has ended normally counts, too.
    """

    def __init__(
        self, comm: MPI.Intracomm, *, outlives_ranks: bool = False, pipes: bool = True
    ) -> None:
        from mpi4py import MPI  # here, because it starts MPI

        from mpistrat.parameter_server.rpc.mpi_messages import MpiMessages

        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.lost: set[int] = set()
        self._outlives_ranks = outlives_ranks
        self._inbox = PipeInbox()
        self._sending = threading.Lock()  # also around calls of MPI
        self._pipes: dict[int, PipeOutbox] = {}
        self._full: dict[int, PipeOutbox] = {}  # by descriptor
        self._pidfds: dict[int, int] = {}  # by rank
        self._watched: dict[int, int] = {}  # ranks, by the pidfds that are polled
        node = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank))
        ranks_of_node = node.allgather(self.rank) if pipes else [self.rank]
        node.Free()
        self._poll = select.poll()
        self._poll.register(self._inbox.descriptor, select.POLLIN)
        addresses = comm.allgather(self._inbox.address)
        for peer in ranks_of_node:
            try:
                self._pipes[peer] = PipeOutbox(addresses[peer], self.rank)
            except OSError:  # a container of its own, or a /proc that shows no other processes
                continue
            if peer != self.rank:
                self._watch(peer, addresses[peer].pid)
        reached = comm.allgather({*self._pipes})  # waits until all ranks have opened pipes
        self._mpi = MpiMessages(comm)
        reached_by_all = set.intersection(*reached)
        reaches_all = len(self._pipes) == self.size
        self._uses_mpi = not reaches_all or self.rank not in reached_by_all
        self._looked = 0.0

    def _watch(self, peer: int, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # before Linux 5.3: only the launcher notices a death
            return
        weakref.finalize(self, os.close, pidfd).atexit = False
        self._pidfds[peer] = pidfd
        self._watched[pidfd] = peer
        self._poll.register(pidfd, select.POLLIN)

    def has_died(self, rank: int) -> bool:
        """Whether the process of `rank` has ended. Asks the kernel for a rank of this node; reads no messages.

        For a rank of another node or container: whether `receive` has already noticed the death. Called by: any thread.
        """
        if rank in self.lost or rank not in self._pidfds:
            return rank in self.lost
        poll = select.poll()  # a new one: only one thread at a time may use it
        poll.register(self._pidfds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def has_lost(self) -> bool:
        """Whether `has_died` is True for any rank. Called by: any thread."""
        return any(self.has_died(rank) for rank in range(self.size))

    def pid_of(self, rank: int) -> int | None:
        """Return the process id of `rank`; None if that rank is on another node or in another container."""
        return self._pipes[rank].pid if rank in self._pipes else None

    def shares_memory_with(self, rank: int) -> bool:
        """Whether this process can open the rank's files in /proc, and so map its memory. True for this rank, too."""
        return rank in self._pipes

    def send(self, to: int, message: Any) -> None:
        """Send any object that can be pickled, without waiting for the receiver. Called by: any thread.

        If the receiver's pipe is full, the rest of the message goes out while a thread of this rank is in `receive`. A
        message to a rank that has died is dropped. Raises: the error of pickling.
        """
        with self._sending:
            pipe = self._pipes.get(to)
            if to in self.lost:
                return
            if pipe is None:
                self._mpi.put(to, message)
            elif not pipe.put(pickle.dumps(message, protocol=5)):
                self._full[pipe.descriptor] = pipe
                self._poll.register(pipe.descriptor, select.POLLOUT)
                self._pipes[self.rank].put(b"")  # wakes a thread that polls already

    def unsent(self, to: Sequence[int]) -> list[int]:
        """Return the living ranks of `to` that have not got all of this rank's messages; [] if all went out.

        Called by: any thread.
        """
        with self._sending:
            return [rank for rank in to if rank not in self.lost and self._is_sending(rank)]

    def _is_sending(self, rank: int) -> bool:
        pipe = self._pipes.get(rank)
        if pipe is None:
            return self._mpi.is_sending(rank)
        return pipe.descriptor in self._full

    def wake(self) -> None:
        """Make this rank's `receive` that waits now (else the next one) return at once. Called by: any thread."""
        with self._sending:
            self._pipes[self.rank].put(b"")

    def receive(self, seconds: float = math.inf) -> list[tuple[int, Any]]:
        """Wait for messages. Called by: one thread at a time.

        Args: seconds: the longest wait.
        Returns: (sender, message) pairs, in the order of sending for each sender. A rank that dies gives one pair with
            the message LOST; later messages from that rank are dropped. The list is empty after a `wake`, after a full
            pipe has taken its waiting messages, after `seconds`, and sometimes for no reason.
        """
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            left = max(0.0, seconds - waited)
            found, woken = self._look(0.0 if self._uses_mpi else left)
            if found or woken or not left:
                return found
            if self._uses_mpi:
                pause = min(waited * _PAUSE, _LONGEST_PAUSE)
                time.sleep(min(left, max(_SHORTEST_PAUSE, pause)))

    def _look(self, seconds: float) -> tuple[list[tuple[int, Any]], bool]:
        """Wait at most `seconds` until a pipe has data or room, and read all messages that have arrived.

        Returns: (sender, message) pairs, also (rank, LOST) for each rank that has died now; and True if `receive` is to
            return even without a message, because a thread has called `wake` or a waiting message has gone out.
        """
        timeout = None if seconds == math.inf else math.ceil(seconds * 1000)
        ready = {descriptor for descriptor, _ in self._poll.poll(timeout)}
        dead = self._exited(ready)
        # A dead rank may have written until its death, so the pipe is read until it is empty.
        received = self._inbox.read(everything=bool(dead))
        found = [(sender, read_message(data)) for sender, data in received if data]
        with self._sending:
            woken = self._flush_pipes(ready) or len(found) < len(received)
            if self._uses_mpi:
                for source, message in self._mpi.read():
                    found.append((source, read_message(*message)))
                woken |= self._mpi.flush()
                dead += self._failed_elsewhere()
            # Messages of dead ranks may still arrive.
            found = [(sender, message) for sender, message in found if sender not in self.lost]
            for rank in set(dead) - self.lost:
                self.lost.add(rank)
                found.append((rank, LOST))
                self._inbox.forget(rank)
                self._mpi.forget(rank)
        return found, woken

    def _exited(self, ready: set[int]) -> list[int]:
        """Return the ranks of this node that have ended, each rank in one call only.

        Args: ready: the descriptors that a poll has just found ready.
        """
        pidfds = ready & self._watched.keys()
        for pidfd in pidfds:
            self._poll.unregister(pidfd)
        return [self._watched.pop(pidfd) for pidfd in pidfds]

    def _flush_pipes(self, ready: set[int]) -> bool:
        """Write waiting messages to pipes that have room again. Returns: whether a pipe has taken all its messages."""
        has_emptied = False
        for descriptor in ready & self._full.keys():
            if self._full[descriptor].flush():
                self._poll.unregister(descriptor)
                del self._full[descriptor]
                has_emptied = True
        return has_emptied

    def _failed_elsewhere(self) -> list[int]:
        """Return the ranks that MPI knows to have died.

        Returns [] if MPI is not fault tolerant, or was asked less than 10 ms ago.
        """
        now = time.monotonic()
        if not self._outlives_ranks or now - self._looked <= _SECONDS_BETWEEN_LOOKS:
            return []
        self._looked = now
        return self._mpi.failed_ranks()
