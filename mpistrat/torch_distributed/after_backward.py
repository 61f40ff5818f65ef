"""Calls of a backward() that wait for its end, as those of DDP's buckets do where no core of the node is free.

Memory does not wait, as a network does: there a communication thread only takes the core from backward(). So the thread
of backward() makes the calls itself, when it has ended and before DDP waits for them.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from types import FrameType

import torch

from mpistrat.communicators.communication_thread import CommunicationThread
from mpistrat.liveness import deadlines
from mpistrat.liveness.call_site import SourceLine


def inside_backward() -> bool:
    """Whether the autograd engine has called what this thread does."""
    return torch._C._current_graph_task_id() != -1


class CallsAfterBackward:
    """The calls of one group that wait. They are made in the order in which they came.

    Attributes:
        is_worth_it: False once backward() has not come to its end in time: then it had better not be waited for.
    """

    def __init__(self) -> None:
        self.is_worth_it = True
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: CommunicationThread | None = None
        # Of the calls since one that found none waiting: the thread has made what it got before; they are made.
        self._batch = threading.Event(), threading.Event()
        self._order = threading.RLock()
        self._maker = 0  # the thread that makes the calls

    def add(
        self, call: Callable[[], None], thread: CommunicationThread, frame: FrameType | SourceLine
    ) -> None:
        """Have `call` made at the end of the backward() that this is called in; by `thread`, if that takes long.

        Args: frame: where the program called, for reports.
        """
        with self._order:
            self._calls.append(call)
            if len(self._calls) == 1:
                self._thread = thread
                self._batch = threading.Event(), threading.Event()
                torch.autograd.Variable._execution_engine.queue_callback(self.make)
                late = functools.partial(self._make_late, *self._batch)
                thread.submit(late, frame)

    def make(self) -> None:
        """Make all calls that wait, on this thread."""
        earlier, made = self._batch
        if self._thread is not None and not self._thread.is_current():
            earlier.wait()
        with self._order:
            outer, self._maker = self._maker, threading.get_ident()
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._maker = outer
            made.set()

    def leave(self) -> None:
        """Make none of the calls that wait."""
        self._calls.clear()
        for event in self._batch:
            event.set()

    def is_making(self) -> bool:
        """Whether this thread makes the calls: what a future's callback calls meanwhile cannot wait."""
        return self._maker == threading.get_ident()

    def _make_late(self, earlier: threading.Event, made: threading.Event) -> None:
        earlier.set()
        # A thread that makes them makes all.
        if not made.wait(deadlines.COMMUNICATION_THREAD_WAITS_FOR_BACKWARD) and self._order.acquire(
            blocking=False
        ):
            try:
                self.is_worth_it = False
                self.make()
            finally:
                self._order.release()
