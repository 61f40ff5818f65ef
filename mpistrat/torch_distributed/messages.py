"""Point-to-point messages between the ranks of a process group, over an MPI communicator that only they use.

A large message moves only while both ranks are in calls of MPI. So a thread calls MPI for all unfinished messages while
the program computes, or waits for other ranks in shared memory.

This file imports mpi4py at its top, and is imported itself only on first use, so that `import mpistrat` starts no MPI.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpistrat.communicators.host_views import bytes_of
from mpistrat.errors import StallError
from mpistrat.liveness import deadlines
from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.records.record import LEAVING, LEFT, STATE
from mpistrat.liveness.records.watch import CommunicatorWatch
from mpistrat.liveness.waiting import wait_until
from mpistrat.torch_distributed.tensors import read, room_for
from mpistrat.torch_distributed.work import OnFailure, UnfinishedWork


class Messages:
    """Sends and receives messages between the ranks of a process group, and waits for them.

    Args:
        comm: the MPI communicator of the group's ranks, in their order. Only this object uses it.
        watch: the group's watch (this rank's record in shared memory of the calls that it waits in, and its peers').

    Attributes:
        timeout: the most seconds that a message may take; 0 for no limit. MPISTRAT_STALL_SECONDS also limits messages.
        on_their_way: number of messages that this rank has sent since `comm` was made, less the number that it has
            received; None while a message of this rank is unfinished.
        unfinished: messages that have neither come through nor failed.
    """

    def __init__(self, comm: MPI.Intracomm, watch: CommunicatorWatch) -> None:
        self.timeout = 0.0
        self._comm = comm
        self._watch = watch
        self._largest_tag = comm.Get_attr(MPI.TAG_UB) or 32767
        self.unfinished: set[Message] = set()
        self._sent_less_received = 0

    @property
    def on_their_way(self) -> int | None:
        unfinished = [message for message in list(self.unfinished) if not message.test()]
        if unfinished:
            return None
        return self._sent_less_received

    def send(self, tensor: Tensor, rank: int, tag: int, failed: OnFailure) -> Message:
        """Begin to send `tensor`. The tensor must not change until the returned message's `wait` returns.

        Args:
            tensor: a dense CPU tensor, of any strides.
            rank: the receiver's rank in the group.
            tag: the receiver must give the same tag.
            failed: called with the message if it fails, on any thread.
        Raises: ValueError for a tag that MPI does not allow, TypeError for a tensor that is not dense.
        """
        self._check(tensor, tag)
        buffer = read(tensor)
        request = self._comm.Isend([bytes_of(buffer), MPI.BYTE], rank, tag)
        self._sent_less_received += 1
        what = f"send({describe(tensor)}) to rank {rank}, tag {tag}"
        return Message(self, request, tensor, buffer, what, failed, peer=rank)

    def receive(self, tensor: Tensor, rank: int | None, tag: int, failed: OnFailure) -> Message:
        """Begin to receive into `tensor`. The values are there when the returned message's `wait` returns.

        Args:
            tensor: a dense CPU tensor, of any strides, with the shape and dtype of the sent tensor.
            rank: the sender's rank in the group; None for any rank.
            tag: the sender's tag.
            failed: called with the message if it fails, on any thread.
        Raises: ValueError for a tag that MPI does not allow, TypeError for a tensor that is not dense.
        """
        self._check(tensor, tag)
        buffer = room_for(tensor)
        source = MPI.ANY_SOURCE if rank is None else rank
        whom = "any rank" if rank is None else f"rank {rank}"
        request = self._comm.Irecv([bytes_of(buffer), MPI.BYTE], source, tag)
        self._sent_less_received -= 1
        what = f"recv({describe(tensor)}) from {whom}, tag {tag}"
        return Message(self, request, tensor, buffer, what, failed, peer=rank, receives=True)

    def begun(self, message: Message) -> None:
        self.unfinished.add(message)
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            _progress.add(message)
        else:
            for earlier in list(self.unfinished):
                earlier.test()

    def wait_for(self, message: Message, seconds: float) -> None:
        """Wait until `message` has come through or failed. Its own error is not raised here.

        Args: seconds: the most seconds to wait; 0 for the group's limit alone.
        Raises:
            StallError: the time is over.
            RuntimeError: the other rank (for a message from any rank: every other rank) has been at the end of its
                program for 10 s.
        """
        limit = self.limit(seconds)
        started = time.monotonic()
        alone_since = math.inf

        def arrived() -> bool:
            nonlocal alone_since
            if message.test():
                return True
            now = time.monotonic()
            alone_since = min(alone_since, now) if self._has_left(message.peer) else math.inf
            if now - alone_since > deadlines.RANK_WAITS_FOR_BYTES_OF_ENDED_RANK:
                peer = "another rank" if message.peer is None else f"rank {message.peer}"
                left = peer.replace("another", "each other")
                raise RuntimeError(
                    f"rank {self._comm.rank} waits in {message.what}, at {message.called_at}, but {left} has come to "
                    f"the end of its program. Make the matching call on {peer}"
                )
            if now - started > limit:
                raise self.stalled(message, limit)
            return False

        wait_until(arrived, self._watch)

    def limit(self, seconds: float = 0.0) -> float:
        """Return the most seconds that a message may take: the smallest of all limits; infinity if there is none.

        The limits are `seconds`, the group's timeout and MPISTRAT_STALL_SECONDS.
        Args: seconds: the caller's limit; 0 for none.
        """
        limits = (seconds, self.timeout, self._watch.record.limit_of(self.timeout))
        return min(filter(None, limits), default=math.inf)

    def stalled(self, message: Message, limit: float) -> StallError:
        """Return the error for a message that has taken longer than `limit` seconds."""
        return StallError(
            f"rank {self._comm.rank} waited {limit:g} s in {message.what}, at {message.called_at}. Does the "
            "other rank make the matching call, with this tag and group? It may be stuck, or have sent it elsewhere"
        )

    def _has_left(self, peer: int | None) -> bool:
        """Whether `peer` has come to the end of its program; for None, whether every other rank has.

        False if this rank cannot see the other ranks' records in shared memory.
        """
        seen = self._watch.peers
        if seen is None:
            return False
        if peer is not None:
            i = peer - (peer > self._comm.rank)  # `peers` leaves out this rank
            seen = seen[i : i + 1]
        states = {words[STATE] for words, _ in seen}
        return states <= {LEAVING, LEFT}

    def _check(self, tensor: Tensor, tag: int) -> None:
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"tag must be from 0 to {self._largest_tag}, got {tag}")
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"messages are dense tensors, got one of layout {tensor.layout}: send its indices and values"
            )


class Message(UnfinishedWork):
    """A message that this rank sends or receives; the work that `send` and `recv` of torch return.

    Attributes:
        what: the call in words, for errors.
        called_at: the line of the program that made the call.
        peer: the other rank of the group; None for a message from any rank.
    """

    def __init__(
        self,
        messages: Messages,
        request: MPI.Request,
        tensor: Tensor,
        buffer: Tensor,
        what: str,
        failed: OnFailure,
        *,
        peer: int | None,
        receives: bool = False,
    ) -> None:
        super().__init__([tensor], failed)
        self.peer = peer
        self.what = what
        self.called_at = call_site(sys._getframe(2))
        self._messages = messages
        self._request = request
        self._buffer = buffer
        self._receives = receives
        self._status = MPI.Status()
        self._lock = threading.Lock()
        # For `get_future`: the most seconds until the future ends, and the time when the future was made.
        self._limit = math.inf
        self._asked_for = 0.0
        if not self.test():
            messages.begun(self)

    def test(self) -> bool:
        """Whether the message has come through or failed. Calls MPI, so that the message moves on.

        If the program has asked for a future, and the message takes longer than the group's limit, the message fails
        with StallError here; this call does not raise. Any thread may call this.
        """
        if self._done.done():
            return True
        error: Exception | None = None
        with self._lock:
            if self._done.done():
                return True
            try:
                if not self._request.Test(self._status):
                    # `get_future`, on another thread, sets `_limit` last.
                    if self._limit > time.monotonic() - self._asked_for:
                        return False
                    error = self._messages.stalled(self, self._limit)
                elif self._receives:
                    self._take()
            except MPI.Exception as failure:
                error = self._explained(failure)
            except Exception as failure:
                error = failure
            self._messages.unfinished.discard(self)
            self.end(error)
        return True

    def is_completed(self) -> bool:
        return self.test()

    def get_future(self) -> torch.futures.Future[Any]:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            self.wait()  # no thread would move the message
        # A wait for a future of torch has no timeout. So `test` lets the message fail after this limit.
        self._asked_for = time.monotonic()
        self._limit = self._messages.limit()
        return super().get_future()

    def source_rank(self) -> int:
        return int(self._status.Get_source())

    _source_rank = source_rank

    def _wait_until_done(self, seconds: float) -> None:
        if not self.test():
            self._messages.wait_for(self, seconds)

    def _take(self) -> None:
        """Copy the received bytes to the tensor. Raises: ValueError if their number differs from the tensor's bytes."""
        nbytes = self._status.Get_elements(MPI.BYTE)
        if nbytes != self._buffer.nbytes:
            raise self._misfit(f"{nbytes} bytes")
        (tensor,) = self.result()
        if self._buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(self._buffer)

    def _explained(self, error: MPI.Exception) -> Exception:
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return self._misfit("more")
        return RuntimeError(f"{self.what}, at {self.called_at}: {error}")

    def _misfit(self, came: str) -> ValueError:
        return ValueError(
            f"{self.what}, at {self.called_at}: {self._buffer.nbytes} bytes were expected, rank "
            f"{self._status.Get_source()} sent {came}. Both ranks must give the same shape and dtype"
        )


class _ProgressThread:
    """A thread that calls MPI for all unfinished messages of this process, at most 1 ms apart.

    It starts with the first message, sleeps while there are none, and ends at exit.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._added = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._pid = os.getpid()

    def add(self, message: Message) -> None:
        with self._added:
            self._messages.append(message)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mpistrat messages", daemon=True
                )
                self._thread.start()
                atexit.register(self._stop, self._thread)
            self._added.notify()

    def _stop(self, thread: threading.Thread) -> None:
        """Stop the thread and wait for its end, because a thread inside MPI may block MPI_Finalize. Called by: exit."""
        with self._added:
            self._stopped = True
            self._added.notify()
        if self._pid == os.getpid():
            thread.join()

    def _run(self) -> None:
        pause = deadlines.PROGRESS_THREAD_SLEEPS_AT_LEAST
        while True:
            with self._added:
                self._added.wait_for(lambda: self._messages or self._stopped)
                messages = list(self._messages)
            if self._stopped:
                return
            ended = {message for message in messages if message.test()}
            pause = min(2 * pause, deadlines.PROGRESS_THREAD_SLEEPS_AT_MOST)
            if ended:
                pause = deadlines.PROGRESS_THREAD_SLEEPS_AT_LEAST
            with self._added:
                self._messages = [message for message in self._messages if message not in ended]
            del messages, ended
            time.sleep(pause)


_progress = _ProgressThread()


def describe(tensor: Tensor) -> str:
    """Return the dtype and the shape of `tensor` for messages: "float32, (2, 3)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}, {tuple(tensor.shape)}"
