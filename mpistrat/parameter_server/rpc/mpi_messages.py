"""Messages through MPI, between processes of different nodes. MPI makes progress only while a thread calls it.

This file imports mpi4py, and is imported on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.liveness.revocable_group import means_rank_lost

# Tags.
HEAD = 1
BUFFERS = 2


_Message = tuple[bytes, list[np.ndarray]]  # a pickle and its buffers


class MpiMessages:
    """Sends and receives messages over a communicator. Called by: one thread at a time.

    Messages to or from a rank that has died are dropped without an error.

    Args: comm: a communicator that only this object uses.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        # Receiver, requests, and the memory that they send
        self._sent: deque[tuple[int, list[MPI.Request], Any]] = deque()
        self._arriving: dict[int, deque[_Arriving]] = {}  # by source, in the order of sending
        self._dropped: list[_Arriving] = []  # kept because MPI may still write to their buffers
        self._broken: set[int] = set()  # ranks that MPI has reported as dead

    def put(self, to: int, message: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        raw = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        lengths = [len(data) for data in raw]
        first = pickle.dumps((head, lengths), protocol=5)
        with self._until_loss_of(to):
            requests = [self._comm.Isend([first, MPI.BYTE], to, HEAD)]
            requests += [
                self._comm.Isend([data, MPI.BYTE], to, BUFFERS) for data in raw if len(data)
            ]
            self._sent.append((to, requests, (first, raw)))
        self.flush()

    def flush(self) -> bool:
        """Free the buffers of messages that MPI has sent. Returns: whether it has sent any since the last call."""
        before = len(self._sent)
        self._dropped = [message for message in self._dropped if not _all_done(message.requests)]
        self._sent = deque(entry for entry in self._sent if not _all_done(entry[1]))
        return len(self._sent) < before

    def is_sending(self, to: int) -> bool:
        """Whether MPI is still sending a message to the rank `to`."""
        self.flush()
        return to in {entry[0] for entry in self._sent}

    def forget(self, rank: int) -> None:
        """Drop the incomplete messages of a dead rank, and ignore all later ones."""
        self._broken.add(rank)
        self._drop(rank)

    def _drop(self, source: int) -> None:
        self._dropped += self._arriving.pop(source, ())

    def failed_ranks(self) -> list[int]:
        """Return the ranks that fault tolerant MPI knows to have died; [] if there are none."""
        with contextlib.suppress(MPI.Exception):
            self._comm.Iprobe()  # lets MPI notice deaths
        group = self._comm.Get_group()
        failed = self._comm.Get_failed()
        try:
            return list(failed.Translate_ranks(None, group))
        finally:
            group.Free()
            failed.Free()

    def read(self) -> Iterator[tuple[int, _Message]]:
        """Yield the messages that have arrived whole, as (source, (pickle, buffers)), in each source's order.

        Does not wait; the caller unpickles the messages.
        """
        status = MPI.Status()
        while (head := self._probe(status)) is not None:
            source = status.source
            if source in self._broken:
                continue
            with self._until_loss_of(source):
                nbytes = status.Get_count(MPI.BYTE)
                arriving = _Arriving(self._comm, source, head, nbytes)
                queue = self._arriving.setdefault(source, deque())
                queue.append(arriving)
        for source, queue in list(self._arriving.items()):
            # All buffers have the same tag, so a message's buffers arrive after the buffers of earlier messages.
            with self._until_loss_of(source):
                while queue and queue[0].has_come():
                    arrived = queue.popleft()
                    yield source, arrived.message
            if not queue or source in self._broken:
                self._drop(source)

    @contextlib.contextmanager
    def _until_loss_of(self, rank: int) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            _check_loss(error)
            self._broken.add(rank)

    def _probe(self, status: MPI.Status) -> MPI.Message | None:
        try:
            return self._comm.Improbe(MPI.ANY_SOURCE, HEAD, status)
        except MPI.Exception as error:
            _check_loss(error)
            self._comm.Ack_failed()  # otherwise MPI finds no more messages from other ranks
            return None


class _Arriving:
    """A message that is arriving: first its head, then its buffers.

    Attributes:
        requests: MPI's receive requests; MPI may write to the buffers until all requests are done.
        message: the message's pickle and buffers; they are valid once `has_come()` returns True.
    """

    def __init__(self, comm: MPI.Intracomm, source: int, head: MPI.Message, nbytes: int) -> None:
        self._comm = comm
        self._source = source
        self._first = bytearray(nbytes)
        self.requests = [head.Irecv([self._first, MPI.BYTE])]
        self._has_head = False
        self.message: _Message = (b"", [])

    def has_come(self) -> bool:
        if not all(request.Test() for request in self.requests):
            return False
        if self._has_head:
            return True
        head, lengths = pickle.loads(self._first)
        buffers = [np.empty(length, np.uint8) for length in lengths]
        self.message = (head, buffers)
        self._has_head = True
        self.requests = [
            self._comm.Irecv([buffer, MPI.BYTE], self._source, BUFFERS)
            for buffer in buffers
            if len(buffer)
        ]
        return self.has_come()


def _all_done(requests: list[MPI.Request]) -> bool:
    """Whether all requests have ended, also those that failed because the other rank has died."""
    return all(_is_done(request) for request in requests)


def _is_done(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as error:
        _check_loss(error)
        return True


def _check_loss(error: MPI.Exception) -> None:
    """Raises: the error, unless it says that a rank has died."""
    if not means_rank_lost(error):
        raise error
