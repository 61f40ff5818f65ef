"""Notices a Ctrl-C that Python cannot act upon, because the main thread is inside a call that does not return."""

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
    """Notices each SIGINT, and whether Python's signal handler has run for it in the main thread.

    Made by: `JobEnd`, once. It works only if it is made in the main thread, the program has set no SIGINT handler, and
    no other code (such as asyncio) has set a wakeup file. Otherwise it notices no SIGINT, and `unanswered` returns
    False.
    """

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._reacted = False
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._reader, self._writer = os.pipe2(flags)
        with contextlib.suppress(ValueError):  # this is not the main thread
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return
            previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            if previous != -1:
                signal.set_wakeup_fd(previous)
                return
            signal.signal(signal.SIGINT, self._react)
            # Signals of a forked child do not concern the rank.
            os.register_at_fork(after_in_child=self._forget)

    def unanswered(self) -> bool:
        """Whether a SIGINT came more than 3 s ago and the main thread has not reacted to it.

        Called by: the thread of `JobEnd`, five times a second. It ends the job if this is True.
        """
        with contextlib.suppress(OSError):  # nothing to read
            arrived = os.read(self._reader, 1024)
            if signal.SIGINT in arrived and self._waiting_since is None:
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
        # ValueError: another thread than the main thread has forked.
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in the block. It changes nothing outside the main thread, or if the program has a SIGINT handler.

    Entered around: the service of parameter servers and of a coordinator's workers, because launchers send Ctrl-C to
    all ranks, and the ranks that they work for decide whether the job ends; also the end of a failed rank.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        if in_main_thread and raises_keyboard_interrupt(before):
            signal.signal(signal.SIGINT, lambda number, frame: None)
            stack.callback(signal.signal, signal.SIGINT, before)
        yield


def is_interactive() -> bool:
    """Whether Python is interactive: the user types the program, and goes on after an error."""
    return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def raises_keyboard_interrupt(handler: object) -> bool:
    """Whether `handler` is Python's own handler of SIGINT, or the handler of `Interrupts` that calls it."""
    ours = getattr(handler, "__func__", None) is Interrupts._react
    return ours or handler is signal.default_int_handler
