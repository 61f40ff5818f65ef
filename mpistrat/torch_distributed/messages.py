"""Point-to-point messages between the ranks of a group, over an MPI communicator that nobody else uses.

A message of some size moves only while both ranks are in calls of MPI. So a thread makes progress with the messages
that are on their way, while the program computes or waits for other ranks in shared memory.

mpi4py is imported at the top of this file, and this file on first use: `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
from typing import Any

import torch
from mpi4py import MPI

from mpistrat.communicators.host_views import bytes_of
from mpistrat.errors import StallError
from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.waiting import wait_until
from mpistrat.liveness.watch import CommunicatorWatch
from mpistrat.settings import stall_seconds
from mpistrat.torch_distributed.tensors import read
from mpistrat.torch_distributed.work import DoneWork

SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3


class Messages:
    """What the ranks of a group send each other.

    Args:
        comm: of the group's ranks, in its order. Messages of other groups do not mix with those of this one.
        watch: of the group; its timeout limits how long a message may take, as MPISTRAT_STALL_SECONDS does.
    """

    def __init__(self, comm: MPI.Intracomm, watch: CommunicatorWatch) -> None:
        self._comm, self._watch = comm, watch
        self._largest_tag = comm.Get_attr(MPI.TAG_UB) or 32767

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> MessageWork:
        """Begin to send `tensor` to `rank` of the group. It must not be changed until the result's `wait` returns."""
        self._check(tag)
        buffer = read(tensor)
        request = self._comm.Isend([bytes_of(buffer), MPI.BYTE], rank, tag)
        what = f"send({describe(tensor)}) to rank {rank}, tag {tag}"
        return MessageWork(self, request, tensor, buffer, what)

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int) -> MessageWork:
        """Begin to receive into `tensor` from `rank` of the group, or, with None, from any rank."""
        self._check(tag)
        own = tensor.detach()
        buffer = own if own.is_contiguous() else torch.empty_like(own).contiguous()
        source = MPI.ANY_SOURCE if rank is None else rank
        request = self._comm.Irecv([bytes_of(buffer), MPI.BYTE], source, tag)
        whom = "any rank" if rank is None else f"rank {rank}"
        what = f"recv({describe(tensor)}) from {whom}, tag {tag}"
        return MessageWork(self, request, tensor, buffer, what, receives=True)

    def wait_for(self, work: MessageWork, seconds: float = 0.0) -> None:
        """Raises: StallError if the message does not come through in time."""
        limits = [limit for limit in (seconds, stall_seconds(), self._watch.timeout) if limit]
        limit = min(limits, default=0.0)
        started = time.monotonic()

        def arrived() -> bool:
            if work.test():
                return True
            if limit and time.monotonic() - started > limit:
                raise StallError(
                    f"rank {self._comm.rank} waited {limit:g} s in {work.what}, at {work.called_at}. Does the other "
                    "rank make the matching call, with this tag and group? It may be stuck, or have sent it elsewhere"
                )
            return False

        wait_until(arrived, self._watch)

    def _check(self, tag: int) -> None:
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"tag must be from 0 to {self._largest_tag}, got {tag}")


class MessageWork(DoneWork):
    """A message on its way.

    Attributes:
        what: the call, in words.
        called_at: where the program made it.
    """

    def __init__(
        self,
        messages: Messages,
        request: MPI.Request,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        what: str,
        *,
        receives: bool = False,
    ) -> None:
        super().__init__([tensor])
        self.what, self.called_at = what, call_site(sys._getframe(2))
        self._messages, self._request, self._buffer = messages, request, buffer
        self._receives, self._status = receives, MPI.Status()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._ended = False
        if not self.test():
            _progress.add(self)

    def test(self) -> bool:
        """Whether the message has come through, or failed. Any thread may call this."""
        if self._ended:
            return True
        with self._lock:
            if not self._ended:
                try:
                    if self._request.Test(self._status):
                        if self._receives:
                            self._take()
                        self._ended = True
                except Exception as error:
                    self._error, self._ended = error, True
        return self._ended

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.test():
            self._messages.wait_for(self, max(0.0, timeout.total_seconds()) if timeout else 0.0)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.test()

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        return super().get_future()

    def source_rank(self) -> int:
        return int(self._status.Get_source())

    _source_rank = source_rank

    def _take(self) -> None:
        """Raises: ValueError if another number of bytes has come than fits."""
        nbytes = self._status.Get_elements(MPI.BYTE)
        if nbytes != self._buffer.nbytes:
            raise ValueError(
                f"{self.what}, at {self.called_at}: {self._buffer.nbytes} bytes were expected, rank "
                f"{self._status.Get_source()} sent {nbytes}. Both ranks must give the same shape and dtype"
            )
        (tensor,) = self.result()
        if self._buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(self._buffer)


class _Progress:
    """A thread that tests the messages on their way; it sleeps while there are none."""

    def __init__(self) -> None:
        self._works: list[MessageWork] = []
        self._added = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, work: MessageWork) -> None:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            return  # messages move while the program waits for them
        with self._added:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mpistrat messages", daemon=True
                )
                self._thread.start()
            self._added.notify()

    def _run(self) -> None:
        pause = SHORTEST_PAUSE
        while True:
            with self._added:
                while not self._works:
                    self._added.wait()
                    pause = SHORTEST_PAUSE
                works = list(self._works)
            if MPI.Is_finalized():
                return
            ended = {work for work in works if work.test()}
            pause = SHORTEST_PAUSE if ended else min(2 * pause, LONGEST_PAUSE)
            with self._added:
                self._works = [work for work in self._works if work not in ended]
            del works, ended
            time.sleep(pause)


_progress = _Progress()


def describe(tensor: torch.Tensor) -> str:
    """The dtype and the shape: "float32, (2, 3)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}, {tuple(tensor.shape)}"
