"""Calls of a backward() that wait for its end, as those of DDP's buckets do where no core of the node is free.

Memory does not wait, as a network does: there a communication thread only takes the core from backward(). So the thread
of backward() makes the calls itself, when it has ended and before DDP waits for them.
"""

from __future__ import annotations

import collections
import datetime
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import torch

from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.liveness.call_site import Place
from mpistrat.torch_distributed.work import UnfinishedWork

# Seconds that the communication thread leaves the calls to backward(), which may wait for the future of one.
PATIENCE = 2.0


def inside_backward() -> bool:
    """Whether the autograd engine has called what this thread does."""
    return torch._C._current_graph_task_id() != -1


class _Batch:
    """The calls between one that found none waiting and the next such one.

    Args: thread: makes them if nobody else does.

    Attributes:
        earlier: set when the thread has made what it got before.
        made: set when they are made.
    """

    def __init__(self, thread: CommunicationThread) -> None:
        self.thread = thread
        self.earlier, self.made = threading.Event(), threading.Event()


class CallsAfterBackward:
    """The calls of one group that wait. They are made in the order in which they came.

    Attributes:
        is_worth_it: False once backward() has not come to its end in time: then it had better not be waited for.
    """

    def __init__(self) -> None:
        self.is_worth_it = True
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._batch: _Batch | None = None
        self._order = threading.RLock()
        self._maker = 0  # the thread that makes the calls

    def add(
        self, call: Callable[[], None], thread: CommunicationThread, frame: FrameType | Place
    ) -> None:
        """Have `call` made at the end of the backward() that this is called in; by `thread`, if that takes long.

        Args: frame: where the program called, for reports.
        """
        with self._order:
            is_first = not self._calls
            self._calls.append(call)
            if is_first:
                batch = self._batch = _Batch(thread)
                torch.autograd.Variable._execution_engine.queue_callback(self.make)
                thread.submit(lambda: self._make_late(batch), frame)

    def make(self) -> None:
        """Make all calls that wait, on this thread."""
        batch = self._batch
        if batch is not None and not batch.thread.is_current():
            batch.earlier.wait()
        with self._order:
            outer, self._maker = self._maker, threading.get_ident()
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._maker = outer
            if batch is not None:
                batch.made.set()

    def leave(self) -> None:
        """Make none of the calls that wait."""
        self._calls.clear()
        if self._batch is not None:
            self._batch.earlier.set()
            self._batch.made.set()

    def is_making(self) -> bool:
        """Whether this thread makes the calls: what a future's callback calls meanwhile cannot wait."""
        return self._maker == threading.get_ident()

    def _make_late(self, batch: _Batch) -> None:
        batch.earlier.set()
        # A thread that makes them makes all.
        if not batch.made.wait(PATIENCE) and self._order.acquire(blocking=False):
            try:
                self.is_worth_it = False
                self.make()
            finally:
                self._order.release()


class WaitingWork(UnfinishedWork):
    """Of a call that waits; who waits for it makes it.

    Args: make: makes the calls that wait.
    """

    def __init__(
        self,
        result: Sequence[torch.Tensor],
        failed: Callable[[UnfinishedWork], None],
        make: Callable[[], None],
    ) -> None:
        super().__init__(result, failed)
        self._make = make

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self._make()
        return super().wait(timeout)
