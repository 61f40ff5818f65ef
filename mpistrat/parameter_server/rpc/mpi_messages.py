"""Messages between processes of different nodes: MPI, whose progress somebody has to ask for again and again.

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
from mpistrat.parameter_server.rpc.unpickling import read_message

HEAD, BUFFERS = 1, 2  # tags


class MpiMessages:
    """Messages over `comm`, which must be used by nobody else. One thread at a time.

    What is under way to or from a rank that has died comes to nothing, silently.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sent: deque[tuple[int, list[MPI.Request], Any]] = deque()
        self._arriving: dict[int, deque[_Arriving]] = {}  # by source, in its order
        self._dropped: list[_Arriving] = []  # MPI may still write to them
        self._broken: set[int] = set()  # ranks of which MPI has said that they died

    def put(self, to: int, message: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        raw = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        first = pickle.dumps((head, [len(one) for one in raw]), protocol=5)
        with self._until_loss_of(to):
            requests = [self._comm.Isend([first, MPI.BYTE], to, HEAD)]
            requests += [self._comm.Isend([one, MPI.BYTE], to, BUFFERS) for one in raw if len(one)]
            self._sent.append((to, requests, (first, raw)))
        self.flush()

    def flush(self) -> bool:
        """Returns whether something that was under way is not any more."""
        before = len(self._sent)
        self._dropped = [one for one in self._dropped if not one.is_over()]
        self._sent = deque(entry for entry in self._sent if not _all_done(entry[1]))
        return len(self._sent) < before

    def is_sending(self, to: int) -> bool:
        """Whether something to this rank is under way."""
        self.flush()
        return any(entry[0] == to for entry in self._sent)

    def forget(self, rank: int) -> None:
        """It has died: what it did not send to its end never comes."""
        self._broken.add(rank)
        self._drop(rank)

    def _drop(self, source: int) -> None:
        self._dropped += self._arriving.pop(source, ())

    def failed_ranks(self) -> list[int]:
        """Those that fault tolerant MPI knows to have died."""
        comm = self._comm
        with contextlib.suppress(MPI.Exception):
            comm.Iprobe()  # lets the news in
        group, failed = comm.Get_group(), comm.Get_failed()
        try:
            return list(failed.Translate_ranks(None, group))
        finally:
            group.Free()
            failed.Free()

    def read(self) -> Iterator[tuple[int, Any]]:
        """The messages that have come, with who sent them; those of one sender in its order."""
        status = MPI.Status()
        while (head := self._probe(status)) is not None:
            if status.source in self._broken:
                continue
            with self._until_loss_of(status.source):
                arriving = _Arriving(self._comm, status.source, head, status.Get_count(MPI.BYTE))
                self._arriving.setdefault(status.source, deque()).append(arriving)
        for source, queue in list(self._arriving.items()):
            # The buffers of a message are asked for after those before them: they have one tag.
            with self._until_loss_of(source):
                while queue and queue[0].has_come():
                    yield source, queue.popleft().message()
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
            self._comm.Ack_failed()  # else no message of others is found any more
            return None


class _Arriving:
    """A message of which some has come."""

    def __init__(self, comm: MPI.Intracomm, source: int, head: MPI.Message, nbytes: int) -> None:
        self._comm, self._source = comm, source
        self._first = bytearray(nbytes)
        self._requests = [head.Irecv([self._first, MPI.BYTE])]
        self._head = b""
        self._buffers: list[np.ndarray] | None = None

    def has_come(self) -> bool:
        if not all(request.Test() for request in self._requests):
            return False
        if self._buffers is None:
            self._head, lengths = pickle.loads(self._first)
            self._buffers = [np.empty(length, np.uint8) for length in lengths]
            self._requests = [
                self._comm.Irecv([buffer, MPI.BYTE], self._source, BUFFERS)
                for buffer in self._buffers
                if len(buffer)
            ]
            return all(request.Test() for request in self._requests)
        return True

    def is_over(self) -> bool:
        """Whether MPI is done with its buffers."""
        return _all_done(self._requests)

    def message(self) -> Any:
        assert self._buffers is not None
        return read_message(self._head, self._buffers)


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
