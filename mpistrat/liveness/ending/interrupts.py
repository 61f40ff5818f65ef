"""Notices a Ctrl-C that Python cannot act upon, because its main thread is inside a call that does not return."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from mpistrat.liveness import deadlines


class Interrupts:
    """Knows whether the main thread has seen each SIGINT; a SIGINT handler of the user's is left alone.

    Make it in the main thread; elsewhere it notices nothing.
    """

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._reacted = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Not the main thread, or somebody (asyncio) already listens there.
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return
            previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            if previous != -1:
                signal.set_wakeup_fd(previous)
                return
            signal.signal(signal.SIGINT, self._react)
            os.register_at_fork(after_in_child=self._forget)  # a child's signals are not ours

    def unanswered(self) -> bool:
        """Whether the main thread has not reacted for 3 s. Called again and again, in any thread."""
        with contextlib.suppress(OSError):  # nothing to read
            if signal.SIGINT in os.read(self._reader, 1024) and self._waiting_since is None:
                self._waiting_since = time.monotonic()
        if self._waiting_since is None:
            return False
        if self._reacted or signal.getsignal(signal.SIGINT) != self._react:
            self._waiting_since = None
            self._reacted = False
            return False
        return time.monotonic() - self._waiting_since > deadlines.RANK_WAITS_FOR_ANSWER_TO_INTERRUPT

    def _react(self, number: int, frame: FrameType | None) -> None:
        self._reacted = True
        signal.default_int_handler(number, frame)

    def _forget(self) -> None:
        # Forked by another thread, which is the child's main thread.
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C ends nothing: launchers send it to all ranks, and those that this one works for decide.

    It changes nothing outside the main thread, nor where the user has set a handler.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        if in_main_thread and raises_keyboard_interrupt(before):
            signal.signal(signal.SIGINT, lambda number, frame: None)
            stack.callback(signal.signal, signal.SIGINT, before)
        yield


def is_interactive() -> bool:
    """Whether somebody types the program, and goes on after an error."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def raises_keyboard_interrupt(handler: object) -> bool:
    """Whether `handler` is Python's own handler of SIGINT, or the one here that calls it."""
    ours = getattr(handler, "__func__", None) is Interrupts._react
    return ours or handler is signal.default_int_handler
