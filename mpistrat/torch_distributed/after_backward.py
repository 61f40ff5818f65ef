"""Calls inside a backward() that wait for its end, as DDP's buckets do if no core of the node is free.

Messages in memory do not wait as on a network, so a communication thread would only take the core from backward().
Instead the thread of backward() makes the calls itself, after backward() and before DDP waits for them.
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
    """Whether the autograd engine is running on this thread, in a hook or a function."""
    return torch._C._current_graph_task_id() != -1


class CallsAfterBackward:
    """The calls of one group that wait for the end of a backward(). They are made in the order of their arrival.

    Attributes:
        is_worth_it: whether later calls should wait, too; False once a backward() has not ended in time.
    """

    def __init__(self) -> None:
        self.is_worth_it = True
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: CommunicationThread | None = None
        # Two events for the calls that wait now: the thread has made all earlier calls; the waiting calls are made.
        self._batch = threading.Event(), threading.Event()
        self._order = threading.RLock()
        self._maker = 0  # id of the thread that makes the calls; 0 for none

    def add(
        self, call: Callable[[], None], thread: CommunicationThread, frame: FrameType | SourceLine
    ) -> None:
        """Keep `call` until the end of the current backward(). If that takes too long, `thread` makes it.

        Args: frame: the line of the program that made the call, for reports.
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
        """Make all calls that wait, on this thread, after the calls that the communication thread got before."""
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
        """Drop all calls that wait."""
        self._calls.clear()
        for event in self._batch:
            event.set()

    def is_making(self) -> bool:
        """Whether this thread makes the calls now: then a call from a future's callback must not wait."""
        return self._maker == threading.get_ident()

    def _make_late(self, earlier: threading.Event, made: threading.Event) -> None:
        """Make the calls on the communication thread if backward() has not ended in time."""
        earlier.set()
        # If another thread holds the lock, it is making all of the calls.
        if not made.wait(deadlines.COMMUNICATION_THREAD_WAITS_FOR_BACKWARD) and self._order.acquire(
            blocking=False
        ):
            try:
                self.is_worth_it = False
                self.make()
            finally:
                self._order.release()
