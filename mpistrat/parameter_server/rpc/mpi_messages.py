"""Messages between processes of different nodes: MPI, which makes progress only when somebody calls it.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
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

HEAD, BUFFERS = 1, 2  # tags


class MpiMessages:
    """Messages over `comm`, which nobody else may use. One thread at a time.

    Messages under way to or from a rank that has died are dropped in silence.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sent: deque[tuple[int, list[MPI.Request], Any]] = deque()
        self._arriving: dict[int, deque[_Arriving]] = {}  # by source, in its order
        self._dropped: list[_Arriving] = []  # MPI may still write to them
        self._broken: set[int] = set()  # ranks that MPI has reported as dead

    def put(self, to: int, message: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        raw = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        first = pickle.dumps((head, [len(data) for data in raw]), protocol=5)
        with self._until_loss_of(to):
            requests = [self._comm.Isend([first, MPI.BYTE], to, HEAD)]
            requests += [
                self._comm.Isend([data, MPI.BYTE], to, BUFFERS) for data in raw if len(data)
            ]
            self._sent.append((to, requests, (first, raw)))
        self.flush()

    def flush(self) -> bool:
        """Drop the messages that have gone out. Returns: whether there were any."""
        before = len(self._sent)
        self._dropped = [message for message in self._dropped if not _all_done(message.requests)]
        self._sent = deque(entry for entry in self._sent if not _all_done(entry[1]))
        return len(self._sent) < before

    def is_sending(self, to: int) -> bool:
        """Whether a message to this rank is under way."""
        self.flush()
        return to in {entry[0] for entry in self._sent}

    def forget(self, rank: int) -> None:
        """Drop what a dead rank has not sent to the end: the rest never comes."""
        self._broken.add(rank)
        self._drop(rank)

    def _drop(self, source: int) -> None:
        self._dropped += self._arriving.pop(source, ())

    def failed_ranks(self) -> list[int]:
        """The ranks that fault tolerant MPI knows to have died."""
        with contextlib.suppress(MPI.Exception):
            self._comm.Iprobe()  # lets the news in
        group, failed = self._comm.Get_group(), self._comm.Get_failed()
        try:
            return list(failed.Translate_ranks(None, group))
        finally:
            group.Free()
            failed.Free()

    def read(self) -> Iterator[tuple[int, tuple[bytes, list[np.ndarray]]]]:
        """The messages that have come, as (source, (pickle, buffers)); those of one source in its order."""
        status = MPI.Status()
        while (head := self._probe(status)) is not None:
            if status.source in self._broken:
                continue
            with self._until_loss_of(status.source):
                arriving = _Arriving(self._comm, status.source, head, status.Get_count(MPI.BYTE))
                self._arriving.setdefault(status.source, deque()).append(arriving)
        for source, queue in list(self._arriving.items()):
            # All buffers have one tag, so those of a message are received after those of the messages before it.
            with self._until_loss_of(source):
                while queue and queue[0].has_come():
                    yield source, queue.popleft().message
            if not queue or source in self._broken:
                self._drop(source)

    @contextlib.contextmanager
    def _until_loss_of(self, rank: int) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            if not means_rank_lost(error):
                raise
            self._broken.add(rank)

    def _probe(self, status: MPI.Status) -> MPI.Message | None:
        try:
            return self._comm.Improbe(MPI.ANY_SOURCE, HEAD, status)
        except MPI.Exception as error:
            if not means_rank_lost(error):
                raise
            self._comm.Ack_failed()  # otherwise MPI finds no message of other ranks any more
            return None


class _Arriving:
    """A message that arrives: first its head, then its buffers.

    Attributes:
        requests: of MPI, which may write to the buffers until they are done.
        message: its pickle and its buffers, once it has come.
    """

    def __init__(self, comm: MPI.Intracomm, source: int, head: MPI.Message, nbytes: int) -> None:
        self._comm, self._source = comm, source
        self._first = bytearray(nbytes)
        self.requests = [head.Irecv([self._first, MPI.BYTE])]
        self._has_head = False
        self.message: tuple[bytes, list[np.ndarray]] = (b"", [])

    def has_come(self) -> bool:
        if not all(request.Test() for request in self.requests):
            return False
        if self._has_head:
            return True
        head, lengths = pickle.loads(self._first)
        self.message = head, [np.empty(length, np.uint8) for length in lengths]
        self._has_head = True
        self.requests = [
            self._comm.Irecv([buffer, MPI.BYTE], self._source, BUFFERS)
            for buffer in self.message[1]
            if len(buffer)
        ]
        return self.has_come()


def _all_done(requests: list[MPI.Request]) -> bool:
    """Whether nothing of this moves any more."""
    return all(_is_done(request) for request in requests)


def _is_done(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as error:
        if not means_rank_lost(error):
            raise
        return True
