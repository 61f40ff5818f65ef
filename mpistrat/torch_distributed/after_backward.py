"""Collective calls inside a backward(), such as DDP's buckets, that are put off until its end.

This happens if no core of the node is free. A communication thread would then only take the core from backward(),
because messages in memory do not wait as on a network. Instead the thread of backward() makes the calls itself, after
backward() and before DDP waits for them.
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
    """The queue of one group's calls that are put off until the end of a backward(). They are made in this order.

    Attributes:
        is_worth_it: whether later calls should be put off, too. It becomes False for good when a backward() has not
            ended in time, so that the communication thread has made its calls.
    """

    def __init__(self) -> None:
        self.is_worth_it = True
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._thread: CommunicationThread | None = None
        # Two events for the calls in the queue. First: the communication thread has made all earlier calls. Second: the
        # calls of the queue are made.
        self._batch = threading.Event(), threading.Event()
        self._order = threading.RLock()
        self._maker = 0  # id of the thread that makes the calls; 0 for none

    def add(
        self, call: Callable[[], None], thread: CommunicationThread, frame: FrameType | SourceLine
    ) -> None:
        """Put `call` off until the end of the current backward(). If that takes too long, `thread` makes it.

        Called by: a collective with `async_op=True`, on a thread that is inside backward().
        Args:
            call: makes the collective, and keeps its error.
            thread: the group's communication thread.
            frame: the line of the program that made the call, for reports.
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
        """Make all calls of the queue on this thread, after the communication thread has made its earlier calls.

        Called by: the engine at the end of backward(), a wait for one of the calls, and the group's next call that the
        program waits for.
        """
        earlier, made = self._batch
        if self._thread is not None and not self._thread.is_current():
            earlier.wait()
        with self._order:
            outer = self._maker
            self._maker = threading.get_ident()
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._maker = outer
            made.set()

    def leave(self) -> None:
        """Drop all calls of the queue. Called by: the abort of the group."""
        self._calls.clear()
        for event in self._batch:
            event.set()

    def is_making(self) -> bool:
        """Whether this thread is inside `make`. A call from a future's callback must then be made at once."""
        return self._maker == threading.get_ident()

    def _make_late(self, earlier: threading.Event, made: threading.Event) -> None:
        """Wait on the communication thread for `made`; if backward() does not end in time, make the calls here.

        Args:
            earlier: is set at once, because this thread has made all earlier calls.
            made: is set when the calls of the queue are made.
        """
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
