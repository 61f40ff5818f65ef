"""Signals that announce the end of the program; nothing happens in their handler but that it is noted.

A checkpoint written inside a signal handler would begin in the middle of a step, at another place on each rank.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from mpistrat.liveness.ending import early_signals
from mpistrat.liveness.ending.interrupts import raises_keyboard_interrupt
from mpistrat.liveness.ending.rank_end import rank_end
from mpistrat.machine.notices import warn_on_first_rank


class SignalFlag:
    """Notes signals for as long as it exists; then they do what they did before.

    Made by: the main thread, to which Python gives signals; RuntimeError elsewhere. A signal is noted, and then the
    handler from before is called. Python's own handler is not called: it would raise KeyboardInterrupt in the middle
    of a step. A signal with a handler outside Python is left to that handler, with a warning.

    Attributes:
        number: of the last signal that came, since a strategy was made; 0 while none has.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self.number = 0
        self.signals = frozenset(signals)
        if not signals:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "signal handlers can only be set on the main thread: make the PreemptionCheckpointHandler there, or "
                "give it TerminationConfig(signals=(), termination_watcher_fn=...)"
            )
        for number in signals:
            _take(number)
        _flags.add(self)
        self.number = self.number or early_signals.heard(self.signals)


_flags: weakref.WeakSet[SignalFlag] = weakref.WeakSet()
_previous: dict[int, Any] = {}  # what handled a signal before
_inside: set[int] = set()


def _take(number: int) -> None:
    before = early_signals.previous(number)
    if before is _arrived:
        return
    if before is None:
        warn_on_first_rank(
            rank_end().rank,
            f"{signal.Signals(number).name} is handled outside Python already, and is left to that: it will not "
            "bring about a checkpoint. Choose others with TerminationConfig(signals=...)",
            stacklevel=4,
        )
        return
    _previous[number] = before
    signal.signal(number, _arrived)


def _arrived(number: int, frame: FrameType | None) -> None:
    if number in _inside:
        return  # a handler set after ours has called ours, and was then taken for the one before
    _inside.add(number)
    try:
        heard = [flag for flag in _flags if number in flag.signals]
        for flag in heard:
            flag.number = number
        previous = _previous[number]
        if callable(previous):
            if not heard or not raises_keyboard_interrupt(previous):
                previous(number, frame)
        elif previous == signal.SIG_DFL and not heard:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
    finally:
        _inside.discard(number)


def _forget() -> None:
    """A child's signals are not ours."""
    for number, previous in _previous.items():
        if signal.getsignal(number) is _arrived:
            signal.signal(number, previous)


os.register_at_fork(after_in_child=_forget)
